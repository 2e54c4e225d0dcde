"""`kubectl torchrun sync` of a running job, by single edits and with --watch, without torch."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.space import Space, until
from e2e.test_reload import STEP, ended, log, plugin, workers
from torchrun_api.kinds.resources import TORCHRUN_JOBS

SECONDS = 180
BROKEN = "def broken(:\n"


def write(directory: Path, number: int) -> None:
    (directory / "train.py").write_text(STEP.format(number=number))


def submitted(space: Space, directory: Path) -> dict[str, str]:
    """The pods of a running job of two nodes with the first code."""
    write(directory, 1)
    command = ["submit", "--name", "run", "--queue", "plain", "--nodes", "2", "--no-follow"]
    ended(plugin(space, directory, *command, "exec python3 train.py"))
    space.wait_phase("run", "Running", SECONDS)
    pods = workers(space)
    until(everywhere(space, pods, "new code: 1 "), "the first code")
    return pods


def everywhere(space: Space, pods: dict[str, str], text: str) -> Callable[[], bool]:
    return lambda: all(text in log(space, pod) for pod in pods)


@pytest.mark.long
def test_sync_watch_delivers_each_edit(space: Space, tmp_path: Path) -> None:
    pods = submitted(space, tmp_path)
    watching = plugin(space, tmp_path, "sync", "run", "--watch")
    try:
        space.wait("torchrunjob/run", "jsonpath={.spec.development}=true")
        write(tmp_path, 2)
        until(everywhere(space, pods, "new code: 2 "), "the edit")
        (tmp_path / "train.py").write_text(BROKEN)
        # A node whose ranks are stopped before they fail waits for newer code.
        until(everywhere(space, pods, "development mode: the pod waits for"), "the broken edit")
        output = ended(plugin(space, tmp_path, "why", "run"))
        assert "waits for the next edit" in output
        assert "SyntaxError" in output
        assert space.get(TORCHRUN_JOBS, "run")["status"]["phase"] == "Running"
        write(tmp_path, 4)
        until(everywhere(space, pods, "new code: 4 "), "the edit after the broken one")
        until(lambda: told_revision(space) == 4, "the status")
        assert "waits for the next edit" not in ended(plugin(space, tmp_path, "why", "run"))
        watching.send_signal(signal.SIGINT)
        assert_ends_clean(watching)
    finally:
        watching.kill()
        watching.communicate()
    assert workers(space) == pods
    status = space.get(TORCHRUN_JOBS, "run")["status"]
    assert (status["phase"], status.get("restarts", 0)) == ("Running", 0)


def told_revision(space: Space) -> int:
    return int(space.get(TORCHRUN_JOBS, "run")["status"].get("workspaceRevision", 0))


def assert_ends_clean(watching: "subprocess.Popen[str]") -> None:
    out, _ = watching.communicate(timeout=SECONDS)
    print(out)
    assert watching.returncode == 130
    assert "Traceback" not in out
    assert out.count("Revision") == 3
    assert "Job run continues with its current files." in out


@pytest.mark.long
def test_a_job_without_development_gets_an_edit_on_request(space: Space, tmp_path: Path) -> None:
    pods = submitted(space, tmp_path)
    for number in (2, 3):
        write(tmp_path, number)
        assert f"Revision {number}: 1 file," in ended(plugin(space, tmp_path, "sync", "run"))
        until(everywhere(space, pods, f"new code: {number} "), "the edit")
    assert "already has this content" in ended(plugin(space, tmp_path, "sync", "run"))
    assert workers(space) == pods
    job = space.get(TORCHRUN_JOBS, "run")
    assert not job["spec"].get("development", False)
    assert (job["status"]["phase"], job["status"].get("restarts", 0)) == ("Running", 0)
