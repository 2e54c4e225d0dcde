"""Commands start fast: they do not import what they do not need."""

import subprocess
import sys

import pytest

from .laptop import Laptop

pytestmark = pytest.mark.long  # processes

# rich draws on terminals, yaml is for -o yaml; the types of the controller are not for the plugin.
HEAVY = ("httpx", "rich", "pygments", "yaml", "torchrun_api.kinds.job", "torchrun_api.kinds.queue")
SCRIPT = f"""
import sys
from kubectl_torchrun.__main__ import cli
try:
    cli(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = sorted(sys.modules.keys() & set({HEAVY}))
upload = [name for name in sys.modules if name.startswith("kubectl_torchrun.upload")]
sys.exit(", ".join(heavy + upload) or 0)
"""


@pytest.mark.parametrize(
    "line",
    [
        *("list", "list -o json", "queues", "status run --no-watch", "logs run", "why run"),
        "suspend run",
    ],
)
def test_commands_import_no_heavy_modules(laptop: Laptop, line: str) -> None:
    laptop.job("run", status={"phase": "Running"})
    laptop.worker("run", 0, 0, "2026-01-01T00:00:00.000000000Z step 1\n")
    flags = [f"--kubeconfig={laptop.kubeconfig}", "--namespace=ns"]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *line.split(), *flags], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
