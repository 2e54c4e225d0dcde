"""What the program of a container does beside running a command."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unit.runtime.launching import FOLDER, Launcher, unread_pipe

pytestmark = pytest.mark.long  # processes

BUG = """
import sys
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch import launcher
launcher.Launcher.prepare = lambda self: self.no_such_setting
sys.exit(launcher.main())
"""

PATIENT = """
import sys
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch import launcher, streams
streams._CLOSE_SECONDS = 300.0
sys.exit(launcher.main())
"""


def test_the_end_waits_for_a_slow_reader_of_the_output(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TORCHRUN_TERMINATION_LOG": str(tmp_path / "log"),
        "TORCHRUN_COMMAND": json.dumps(f"seq 1 20000; touch {tmp_path}/ended"),
        "TORCHRUN_STATE_DIR": str(tmp_path),
        "TORCHRUN_ATTEMPT": "0",
    }
    script = PATIENT.format(runtime=str(FOLDER.parents[1]))
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as launcher:
        while not (tmp_path / "ended").exists():
            assert launcher.poll() is None
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(0.5)
        output, _ = launcher.communicate()
    assert output.split() == [str(number) for number in range(1, 20001)]


def test_setup_runs_no_command(launcher: Launcher) -> None:
    result = launcher.start("echo ran; exit 3", "setup").end()
    assert (result.exit_code, result.out, result.message) == (0, "", {})


def test_a_bug_of_the_launcher_is_reported_with_its_traceback(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    script = BUG.format(runtime=str(FOLDER.parents[1]))
    environment = {**os.environ, "TORCHRUN_TERMINATION_LOG": str(log), "TORCHRUN_COMMAND": '"true"'}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    message = json.loads(log.read_text())
    assert (ended.returncode, message["reason"]) == (message["exitCode"], "LaunchFailed")
    assert "The launcher has a bug: AttributeError(" in message["message"]
    assert "Traceback" in ended.stderr
    assert "no_such_setting" in ended.stderr


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"TORCHRUN_CPUS": "96", "PET_NPROC_PER_NODE": "8"}, "12"),
        ({"TORCHRUN_CPUS": "3", "PET_NPROC_PER_NODE": "8"}, "1"),
        ({"TORCHRUN_CPUS": "8", "PET_NPROC_PER_NODE": "1"}, "8"),
        ({"TORCHRUN_CPUS": "96", "PET_NPROC_PER_NODE": "8", "OMP_NUM_THREADS": "4"}, "4"),
        ({"TORCHRUN_CPUS": "96", "PET_NPROC_PER_NODE": "8", "TORCHRUN_LAUNCHER": "none"}, ""),
        ({"TORCHRUN_CPUS": "0", "PET_NPROC_PER_NODE": "8"}, ""),
        ({"PET_NPROC_PER_NODE": "8"}, ""),
    ],
)
def test_ranks_share_the_cpus_of_their_pod(
    launcher: Launcher, variables: dict[str, str], threads: str
) -> None:
    result = launcher.start("echo =$OMP_NUM_THREADS", **variables).end()
    assert result.out == f"={threads}\n"
    is_default = threads and "OMP_NUM_THREADS" not in variables
    assert result.err.count("OMP_NUM_THREADS is") == bool(is_default)


def test_the_end_waits_for_no_reader_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    environment = {**os.environ, "TORCHRUN_TERMINATION_LOG": str(log), "TORCHRUN_LAUNCHER": "none"}
    with unread_pipe() as writer:
        ended = subprocess.run(
            [sys.executable, str(FOLDER)],
            env={**environment, "TORCHRUN_COMMAND": '"exit 3"'},
            stdout=subprocess.DEVNULL,
            stderr=writer,
        )
    assert (ended.returncode, json.loads(log.read_text())["exitCode"]) == (3, 3)
