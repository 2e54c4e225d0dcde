"""Calls on this machine: the plugin and its launchers, without kubectl and a cluster."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..pods import SECONDS

pytestmark = pytest.mark.long  # processes

ROOT = Path(__file__).parents[4]
SOURCES = ("api", "controller", "runtime", "plugin", "sdk")
SCRIPT = """\
import os, signal, time
import torchrun_sdk as kt


def f(value, fails=""):
    rank = os.environ["RANK"]
    print("in rank", rank, flush=True)
    if fails and rank == "0":
        time.sleep(600)
    if fails == "raise":
        raise ValueError("bad batch")
    if fails == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return [rank, value, os.environ.get("LR")]


def g(workers):
    return workers


remote = kt.fn(f).to(kt.Compute(gpus=8, env={"LR": "$(x)$"}))
try:
    print("returned", {call})
except kt.SdkError as error:
    print([kind.__name__ for kind in type(error).__mro__], getattr(error, "rank", None), error)
"""
# Stands for that of PyTorch: one rank on each node.
TORCHRUN = """\
#!/bin/sh
while [ "$1" != --no-python ]; do shift; done
shift
RANK=$PET_NODE_RANK WORLD_SIZE=$PET_NNODES LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 exec "$@"
"""
RESULT = "returned [['0', 2, '$(x)$'], ['1', 2, '$(x)$']]"


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("remote.local(2, workers=2)", ("[0] in rank 0", "[1] in rank 1", RESULT)),
        ("remote.options(serialization='pickle').local(value=2, workers=2)", (RESULT,)),
        ("remote.options(returns='head').local(2, workers=2)", ("returned ['0', 2, '$(x)$']",)),
        (
            "remote.options(stream_logs=False).local(2, workers=1)",
            ("returned [['0', 2, '$(x)$']]",),
        ),
        ("remote.local(2, fails='raise', workers=2)", ("'ValueError'", " 1 ValueError: bad batch")),
        ("remote.local(2, fails='die', workers=2)", ("['RankExited'", "SIGKILL")),
        ("remote.options(timeout=1).local(2, 'sleep', workers=2)", ("['CallTimeout'", "1 s")),
        ("remote.local(2, workers=0)", ("['UsageError'", "workers is 0")),
        ("remote.local(2, workers=5000)", ("['UsageError'", "5000 ranks")),
        ("remote.distribute('ray').local(2, workers=2)", ("['UsageError'", "a cluster for Ray")),
        ("kt.fn(g).local(workers=2)", ("returned 2",)),
        (
            "os.remove('bin/kubectl-torchrun') or remote.local(2, workers=2)",
            ("['UsageError'", "pip"),
        ),
    ],
)
def test_a_call_on_this_machine_ends_as_in_a_cluster(
    call: str, shown: tuple[str, ...], tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl-torchrun").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m kubectl_torchrun "$@"\n'
    )
    (programs / "torchrun").write_text(TORCHRUN)
    for program in programs.iterdir():
        program.chmod(0o755)
    (programs / "python3").symlink_to(sys.executable)
    (tmp_path / "script.py").write_text(SCRIPT.replace("{call}", call))
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={
            "PATH": os.pathsep.join([str(programs), *_directories("sh", "env", "sleep")]),
            "PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in SOURCES),
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    output = f"{ended.stdout}\n--- stderr\n{ended.stderr}"
    assert ended.returncode == 0, output
    for text in shown:
        assert text in ended.stdout, output
    if "stream_logs" in call:
        assert "in rank" not in ended.stdout, output


def _directories(*programs: str) -> list[str]:
    return [str(Path(found).parent) for name in programs if (found := shutil.which(name))]
