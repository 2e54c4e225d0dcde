"""The compared programs, each in its own process, and their resource usage."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec

from torchrun_bench.http import Server
from torchrun_cluster.places import cache_home

CONTROLLER_NAMESPACE, BARE_NAMESPACE = "bench-controller", "bench-bare"
NAMESPACES = (CONTROLLER_NAMESPACE, BARE_NAMESPACE)
TICKS = os.sysconf("SC_CLK_TCK")
# Created by `make bench`: only the dependencies of the controller, as in its image.
_INSTALLED = Path(sys.prefix) / "controller" / "bin" / "python"
PYTHON = str(_INSTALLED) if _INSTALLED.exists() else sys.executable
WRITE_VERBS = frozenset({"post", "put", "patch", "delete"})
NOT_COUNTED = ("events", "leases", "selfsubject")  # a review changes nothing

_SAMPLE = re.compile(r"^torchrun_api_requests_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Usage(msgspec.Struct, frozen=True):
    """CPU seconds since the start, and resident memory in MiB: peak and current."""

    cpu_seconds: float
    peak_mib: float
    mib: float


def usage(pid: int) -> Usage:
    """Read the usage of a running process from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    ticks = int(fields[11]) + int(fields[12])
    peak, now = (int(status[name].split()[0]) / 1024 for name in ("VmHWM", "VmRSS"))
    return Usage(cpu_seconds=ticks / TICKS, peak_mib=peak, mib=now)


def settled(pid: int, *, still: float = 1.0, longest: float = 120.0) -> Usage:
    """Wait until the process has used almost no CPU for `still` seconds. Returns its usage."""
    end = time.monotonic() + longest
    before = usage(pid).cpu_seconds
    while time.monotonic() < end:
        time.sleep(still)
        now = usage(pid)
        if now.cpu_seconds - before <= 0.02 * still:
            return now
        before = now.cpu_seconds
    raise RuntimeError(f"process {pid} was not at rest after {longest:.0f} s")


class Requests(msgspec.Struct, frozen=True):
    """Requests of a controller so far, by verb and resource, from its metrics."""

    by_kind: dict[tuple[str, str], int]

    def since(self, before: "Requests") -> "Requests":
        """The requests since `before`."""
        kinds = self.by_kind.items()
        new_requests = {kind: number - before.by_kind.get(kind, 0) for kind, number in kinds}
        return Requests({kind: number for kind, number in new_requests.items() if number})

    @property
    def writes(self) -> int:
        """Writes, without events, leases and reviews of permissions."""
        return sum(self.writes_by_kind().values())

    def writes_by_kind(self) -> dict[str, int]:
        """Writes by resource."""
        kinds = self.by_kind.items()
        return {
            f"{verb} {what}": n
            for (verb, what), n in kinds
            if verb in WRITE_VERBS and not what.startswith(NOT_COUNTED)
        }


def requests(port: int) -> Requests:
    """Read the metrics of the controller."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    counts: dict[tuple[str, str], int] = {}
    for labels, value in _SAMPLE.findall(text):
        label_values = dict(_LABEL.findall(labels))
        kind = label_values["verb"], label_values["resource"]
        counts[kind] = counts.get(kind, 0) + int(float(value))
    return Requests(counts)


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def controller_command(kubeconfig: Path, port: int) -> list[str]:
    """The command of the controller for all namespaces, without leader election.

    The other settings are the defaults, with the log level `info`.
    """
    return [
        PYTHON, "-m", "torchrun_controller",
        "--kubeconfig", str(kubeconfig),
        "--runtime-image", "bench/none",
        "--leader-election", "false",
        "--listen-address", "127.0.0.1",
        "--listen-port", str(port),
    ]  # fmt: skip


@contextmanager
def controller(kubeconfig: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the controller until the end of the block."""
    _compiled()
    command = controller_command(kubeconfig, port)
    with tempfile.TemporaryFile() as log, running(command, log.fileno(), log.fileno()) as process:
        yield process


BareMode = Literal["follow", "list"]


@contextmanager
def bare(
    server: Server, namespace: str, mode: BareMode = "follow", plan: bytes = b"{}"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the bare client, see `bare.py`. With "follow", wait until it is ready to write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "server.json").write_bytes(msgspec.json.encode(server))
        (folder / "plan.json").write_bytes(plan)
        command = [
            PYTHON, "-m", "torchrun_bench.bare",
            str(folder / "server.json"), namespace, str(folder / "plan.json"), mode,
        ]  # fmt: skip
        with running(command, subprocess.PIPE) as process:
            if mode == "follow":
                wait_for_word(process, "ready")
            yield process


def wait_for_word(process: subprocess.Popen[bytes], word: str) -> None:
    """Wait until the process has written this line. Raises RuntimeError if it ends before."""
    assert process.stdout is not None
    if process.stdout.readline().decode().strip() != word:
        raise RuntimeError(f"the bare client did not say {word!r}")


@cache
def _bytecode() -> Path:
    """Measure compiled code, as users install it, even with PYTHONDONTWRITEBYTECODE."""
    folder = cache_home() / "bench-bytecode"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _compiled() -> None:
    imports = "import torchrun_controller.app, kubernetes_asyncio, torchrun_bench.bare"
    subprocess.run([PYTHON, "-c", imports], env=compiled_environment(), check=True)


def compiled_environment() -> dict[str, str]:
    """The environment of this process, with the bench on its path and with bytecode files."""
    root = Path(__file__).resolve().parent.parent.parent
    path = os.pathsep.join(str(root / folder) for folder in ("bench", "cluster"))
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    return environment | {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(_bytecode())}


@contextmanager
def running(
    command: list[str], stdout: int | None = None, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the end of the block. Raises RuntimeError if it ends by itself."""
    environment = compiled_environment()
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
    try:
        yield process
        if process.poll() not in (None, 0):
            raise RuntimeError(f"{command[:3]} ended with {process.returncode} during the bench")
    finally:
        process.terminate()
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()


def is_ready(port: int) -> bool:
    """Whether the controller or JobSet on this port is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def until_ready(port: int, seconds: float = 300) -> None:
    """Wait until it is ready. Raises RuntimeError after a timeout."""
    end = time.monotonic() + seconds
    while not is_ready(port):
        if time.monotonic() > end:
            raise RuntimeError(f"the controller was not ready after {seconds} s")
        time.sleep(0.005)


async def ready(port: int, seconds: float = 60) -> None:
    """Wait until the controller is ready."""
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end:
            try:
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
    raise RuntimeError(f"the controller was not ready after {seconds} s")
