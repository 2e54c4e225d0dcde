"""The torchrun that waits for the next round. Here torchrun is a small program with its name."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch import standby
from torchrun_runtime.launch.processes import descendants, send, state
from unit.runtime.launching import SECONDS, Launched, Launcher, changed, script

TORCHRUN = """
    import os, subprocess, sys

    open(os.path.join(os.environ["HOME"], f"imported.{os.getpid()}"), "w").close()

    def main(arguments):
        assert arguments[0] == "--no-python"
        environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        return subprocess.run(arguments[1:], env=environment).returncode

    if __name__ == "__main__":
        sys.exit(main(sys.argv[1:]))
"""
TRAIN = """
    import os, signal, sys, time
    import torchrun_progress
    number = os.environ["TORCHRUN_ROUND"]
    torchrun_progress.report(step=int(number))
    print(number, os.getppid(), os.getcwd(), os.environ["PET_RDZV_ID"], flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    if number == "2":
        raise ValueError("of the second restart")
    time.sleep(1000)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    package = tmp_path / "packages" / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    script(package, TORCHRUN, "run.py")
    script(tmp_path, TRAIN, "train.py")
    launcher = Launcher(sys.executable, tmp_path)
    yield launcher
    launcher.clear()


def start(launcher: Launcher, **environment: str) -> Launched:
    return launcher.start(
        [sys.executable, "train.py"],
        PATH="/usr/bin:/bin",  # without a torchrun
        PYTHONPATH=str(launcher.directory / "packages"),
        TORCHRUN_IN_PLACE_RESTARTS=json.dumps({"restarts": 5, "exitCodes": [], "signals": []}),
        PET_RDZV_ID="job-0",
        **environment,
    )


def waiting(directory: Path) -> int | None:
    """The pid of a Python that has imported torchrun and waits; each one is found once."""
    for path in directory.glob("imported.*"):
        pid = int(path.suffix[1:])
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "standby_agent.py" in line and state(pid).startswith("S"):
            path.unlink()
            return pid
    return None


def await_waiting(launched: Launched, directory: Path) -> int:
    deadline = time.monotonic() + SECONDS
    while (pid := waiting(directory)) is None:
        assert time.monotonic() < deadline
        assert launched.process.poll() is None, launched.end()
        time.sleep(0.02)
    return pid


def kill_rank(launched: Launched) -> None:
    ranks = [p for p in descendants(launched.process.pid) if _is_rank(p.pid)]
    assert ranks
    os.kill(ranks[-1].pid, signal.SIGKILL)


def _is_rank(pid: int) -> bool:
    return "train.py" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_the_next_round_runs_in_the_torchrun_that_waits(launcher: Launcher) -> None:
    launched = start(launcher)
    here = str(launcher.directory)
    number, agent, *rest = launched.line().split()
    assert (number, rest) == ("0", [here, "job-0"])
    first = await_waiting(launched, launcher.directory)
    assert first != int(agent)
    kill_rank(launched)
    assert launched.line().split() == ["1", str(first), here, "job-0-r1"]
    second = await_waiting(launched, launcher.directory)
    assert second != first
    kill_rank(launched)
    assert launched.line().split() == ["2", str(second), here, "job-0-r2"]
    third = launched.line()  # after its exception the next round starts
    assert third.startswith("3 ")
    launched.stop()
    result = launched.end()
    assert result.exit_code == 143
    assert result.err.count("to stderr") == 4
    assert "ValueError: of the second restart" in result.err


def test_the_waiting_torchrun_ends_with_the_launcher(launcher: Launcher) -> None:
    launched = start(launcher)
    launched.line()
    pid = await_waiting(launched, launcher.directory)
    others = [p for p in descendants(launched.process.pid) if p.pid != pid]
    os.kill(launched.process.pid, signal.SIGKILL)
    send(others, signal.SIGKILL)  # they would hold its pipes
    deadline = time.monotonic() + SECONDS
    while not state(pid).startswith(("gone", "Z")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launched.process.communicate()


def test_without_a_waiting_torchrun_a_new_one_runs(launcher: Launcher) -> None:
    launched = start(launcher)
    launched.line()
    pid = await_waiting(launched, launcher.directory)
    os.kill(pid, signal.SIGKILL)
    kill_rank(launched)
    number, agent, *_ = launched.line().split()
    assert number == "1"
    assert int(agent) != pid
    launched.stop()
    assert launched.end().exit_code == 143


@pytest.mark.parametrize(
    ("environment", "limits"),
    [
        ({"TORCHRUN_STANDBY": "0"}, {}),
        ({}, {"standby.py": {"NEEDED = 2 << 30": "NEEDED = 1 << 60"}}),
    ],
    ids=["off", "no memory"],
)
def test_no_torchrun_waits(
    launcher: Launcher, environment: dict[str, str], limits: dict[str, dict[str, str]]
) -> None:
    hang_watch = {"TORCHRUN_HANG_TIMEOUT_SECONDS": "1"}  # it looks as often as the one for torchrun
    launched = start(changed(launcher, limits) if limits else launcher, **hang_watch, **environment)
    assert launched.line().startswith("0 ")
    assert launched.line().startswith("1 ")  # the first round has hung
    assert len(set(launcher.directory.glob("imported.*"))) == 2
    launched.stop()
    assert launched.end().exit_code == 143


def test_the_free_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "_CGROUP", str(tmp_path))
    of_machine = standby.available_memory()
    assert of_machine > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300\n")
    assert standby.available_memory() > 1000
    (tmp_path / "memory.max").write_text("1500\n")
    assert standby.available_memory() == 800
