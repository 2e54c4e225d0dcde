"""The launcher with real torchrun. TORCHRUN_TEST_TORCH_PYTHON names a python with torch."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.runtime.launching import Launcher, launcher_with_training, torchrun_environment

PYTHON = os.environ.get("TORCHRUN_TEST_TORCH_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="TORCHRUN_TEST_TORCH_PYTHON does not name a python with torch"
)

TRAIN = """
    import os, signal, sys, time
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    if sys.argv[1] == "wait":
        signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"saved %d\\n" % rank), sys.exit(0)))
        os.write(1, b"ready\\n")
        while True: time.sleep(60)
    if rank == 1:
        exec(sys.argv[1])
    dist.barrier()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    yield from launcher_with_training(PYTHON, tmp_path, TRAIN)


def command(code: str) -> "list[str]":
    return ["python", "train.py", code]


@pytest.mark.parametrize(
    ("code", "exit_code", "number", "message"),
    [
        ("raise ValueError('bad batch')", 1, None, "ValueError: bad batch"),
        ("os._exit(9)", 9, None, "Rank 1 ended with exit code 9"),
        ("os.kill(os.getpid(), 9)", 137, 9, "Rank 1 was killed by SIGKILL"),
    ],
)
def test_the_first_failed_rank_is_the_cause(
    launcher: Launcher, code: str, exit_code: int, number: "int | None", message: str
) -> None:
    result = launcher.run(command(code), **torchrun_environment(PYTHON))
    assert result.exit_code == exit_code, result.err
    assert result.message["rank"] == 1
    assert result.message["exitCode"] == exit_code
    assert result.message["signal"] == number
    assert str(result.message["message"]).startswith(message)


def test_success(launcher: Launcher) -> None:
    result = launcher.run(command("pass"), **torchrun_environment(PYTHON))
    assert (result.exit_code, result.message) == (0, {}), result.err


def test_the_cause_is_known_for_a_shell_line_with_torchrun(launcher: Launcher) -> None:
    line = "cd . && torchrun train.py 'os._exit(5)'"
    result = launcher.run(line, **torchrun_environment(PYTHON))
    assert (result.exit_code, result.message["rank"]) == (5, 1), result.err


def test_a_hang_is_no_failure_that_torchrun_restarts_by_itself(launcher: Launcher) -> None:
    environment = torchrun_environment(
        PYTHON, PET_MAX_RESTARTS="2", TORCHRUN_HANG_TIMEOUT_SECONDS="2", NODE_RANK="0"
    )
    code = "print('blocks', flush=True); time.sleep(1000)"
    result = launcher.run(command(code), **environment)
    assert (result.exit_code, result.message["reason"]) == (124, "Hung"), result.err
    assert result.out.count("blocks") == 1
    assert " in barrier" in result.err
    assert "of rank 0:" in result.err
    assert "of rank 1:" in result.err
    assert "most recent call first" in result.err


@pytest.mark.parametrize("max_restarts", ["0", "2"])
def test_ranks_save_when_stopped(launcher: Launcher, max_restarts: str) -> None:
    environment = torchrun_environment(PYTHON, PET_MAX_RESTARTS=max_restarts)
    launched = launcher.start(command("wait"), **environment)
    assert [launched.line(), launched.line()] == ["ready", "ready"]
    launched.stop(signal.SIGTERM)
    result = launched.end()
    assert sorted(result.out.splitlines()) == ["saved 0", "saved 1"]
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")
