"""The GPU of this machine, and the Python whose torch uses it."""

import ctypes
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache

PYTHON = os.environ.get("TORCHRUN_TEST_TORCH_PYTHON") or sys.executable
_PROBE = """
import json, platform, torch
print(json.dumps({
    "GPU": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
    "torch": torch.__version__,
    "CUDA": torch.version.cuda,
    "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
    "Python": platform.python_version(),
}))
"""


@cache
def versions() -> "dict[str, str]":
    """GPU, torch, CUDA, NCCL and Python by name; empty if the Python has no torch."""
    probe = subprocess.run([PYTHON, "-c", _PROBE], capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(probe.stdout) if probe.returncode == 0 else {}
    return found


@cache
def missing() -> str:
    """What this machine lacks for these tests; empty if nothing."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "no NVIDIA driver: libnvidia-ml.so.1 (NVML) is missing"
    if not versions():
        return f"{PYTHON} cannot import torch (TORCHRUN_TEST_TORCH_PYTHON names another one)"
    if not versions()["GPU"]:
        return f"torch {versions()['torch']} of {PYTHON} can use no GPU"
    return ""


def _driver() -> str:
    """The version of the NVIDIA driver."""
    library, text = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(80)
    library.nvmlInit_v2()
    library.nvmlSystemGetDriverVersion(text, len(text))
    library.nvmlShutdown()
    return text.value.decode()


def table(results: "list[tuple[str, str]]") -> str:
    """Cases and what was seen, as Markdown of docs/gpu.md, with the date and the versions."""
    all_versions = {**versions(), "driver": _driver()}
    of_what = ", ".join(f"{name} {version}" for name, version in all_versions.items())
    lines = [f"{datetime.now(UTC):%Y-%m-%d}: {of_what}.", "", "| case | seen |", "|---|---|"]
    return "\n".join([*lines, *(f"| {case} | {seen} |" for case, seen in results)])
