"""The hang watch with real processes: which ranks hang, and what the message says."""

import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from torchrun_runtime.launch import watchdogs
from torchrun_runtime.launch.watchdogs import HangWatchdog
from unit.runtime.launching import Launcher, Result, changed, script

pytestmark = pytest.mark.long  # processes

# The launcher has time for stacks that a busy machine writes slowly.
PATIENCE = {"_WAIT_SECONDS = 2.0": "_WAIT_SECONDS = 60.0", "_PAUSE = 0.05": "_PAUSE = 1.0"}


@pytest.fixture
def patient(launcher: Launcher) -> Launcher:
    return changed(launcher, {"stacks.py": PATIENCE})


def run(launcher: Launcher, text: str, seconds: float = 0.5, **environment: str) -> Result:
    (launcher.directory / "script.py").write_text(textwrap.dedent(text))
    return launcher.run(
        [launcher.python, "script.py"],
        TORCHRUN_LAUNCHER="none",
        TORCHRUN_HANG_TIMEOUT_SECONDS=str(seconds),
        **environment,
    )


def test_silence_after_the_first_output_is_a_hang(patient: Launcher) -> None:
    text = """
        import threading
        begun = threading.Event()
        def reading():
            begun.set()
            threading.Event().wait()
        threading.Thread(target=reading, daemon=True).start()
        def training():
            begun.wait()
            print("step 1")
            threading.Event().wait()
        training()
    """
    result = run(patient, text)
    assert (result.exit_code, result.out) == (124, "step 1\n")
    assert result.message["reason"] == "Hung"
    assert "No progress report and no output for" in str(result.message["message"])
    assert "hangTimeoutSeconds" in str(result.message["message"])
    assert " in training" in result.err
    assert " in reading" in result.err, "the stacks of all threads"


RANKS = """
    import os, subprocess, sys, time
    ranks = [
        subprocess.Popen(
            [sys.executable, "rank.py"], env=dict(os.environ, LOCAL_RANK=str(n), RANK=str(n))
        )
        for n in range(2)
    ]
    for rank in ranks: rank.wait()
    print("the agent saw its ranks end")
"""
# Ranks and children wait for each other, so that all hang in their functions.
RANK = """
    import os, time
    import torchrun_progress
    def ready(kind): open(f"{kind}.{os.environ['RANK']}", "w").close()
    if os.fork() == 0:
        def loading():
            ready("child")
            time.sleep(1000)
        loading()
    def stuck_in_step_3():
        for step in range(4): torchrun_progress.report(step=step, total=100)
        ready("rank")
        while not all(map(os.path.exists, ("rank.0", "rank.1", "child.0", "child.1"))):
            time.sleep(0.05)
        open("hangs", "w").close()
        time.sleep(1000)
    stuck_in_step_3()
"""
# The watch waits for slow ranks, too.
ALL_HANG = {
    "if silence < self._seconds:": "if silence < self._seconds or not os.path.exists('hangs'):"
}


def test_every_rank_and_its_children_give_their_stacks(launcher: Launcher) -> None:
    (launcher.directory / "rank.py").write_text(textwrap.dedent(RANK))
    result = run(changed(launcher, {"stacks.py": PATIENCE, "watchdogs.py": ALL_HANG}), RANKS)
    assert result.exit_code == 124
    assert result.out == "", "an agent may restart ranks that end"
    headers = re.findall(r"stack of \S+ of rank (\d):", result.err)
    assert sorted(headers) == ["0", "0", "1", "1"]
    assert result.err.count(" in stuck_in_step_3") == 2
    assert result.err.count(" in loading") == 2
    parts = re.split(r"torchrun-launch: stack of .*:\n", result.err)
    assert all(part.count("most recent call first") == 1 for part in parts[1:]), "not mixed"
    assert "was the first without progress reports" in str(result.message["message"])


@pytest.mark.parametrize(
    ("seconds", "text", "why"),
    [
        (0.5, "import time; time.sleep(2)", "there was no output yet"),
        (
            1.5,
            "import torchrun_progress, time; print('loading', flush=True); time.sleep(3)",
            "a program with reports is watched from the first one",
        ),
        (
            6.0,
            """
            import time
            for _ in range(24): print("x", flush=True); time.sleep(0.3)
            """,
            "it writes",
        ),
        (
            6.0,
            """
            import torchrun_progress, time
            for step in range(7): torchrun_progress.report(step); time.sleep(1.01)
            """,
            "it reports",
        ),
        (
            6.0,
            """
            import torchrun_progress, time
            torchrun_progress.report(1)
            with torchrun_progress.idle(): time.sleep(8)
            """,
            "it is idle by its own report",
        ),
    ],
    ids=["silent", "compiles", "writes", "reports", "idle"],
)
def test_activity_that_is_no_hang(launcher: Launcher, seconds: float, text: str, why: str) -> None:
    """Each program runs longer than its timeout, whose margin is that of a busy machine."""
    result = run(launcher, text, seconds)
    assert result.exit_code == 0, why
    assert "no progress report" not in result.err


@pytest.mark.parametrize("first", ["print('step 1', flush=True)", "torchrun_progress.report(1)"])
def test_the_watch_resumes_after_a_wait(launcher: Launcher, first: str) -> None:
    text = f"""
        import torchrun_progress, time
        {first}
        with torchrun_progress.idle(): time.sleep(1)
        time.sleep(1000)
    """
    assert run(launcher, text).message["reason"] == "Hung"


def test_output_does_not_matter_on_nodes_without_rank_0(launcher: Launcher) -> None:
    text = "import time; print('warning'); time.sleep(2)"
    assert run(launcher, text, NODE_RANK="1").exit_code == 0


@pytest.mark.parametrize(("rank", "exit_code"), [("3", 0), ("0", 124)])
def test_with_c10d_rank_0_may_be_on_any_node(launcher: Launcher, rank: str, exit_code: int) -> None:
    node, seconds = ("1", 1000) if rank == "0" else ("0", 3)
    text = f"import time; print('warning'); time.sleep({seconds})"
    assert run(launcher, text, RANK=rank, NODE_RANK=node).exit_code == exit_code


def test_ranks_without_a_heartbeat_do_not_hang(launcher: Launcher) -> None:
    (launcher.directory / "rank.py").write_text(
        "import os, time, torchrun_progress\n"
        "if os.environ['RANK'] == '1': torchrun_progress.report(step=1)\n"
        "time.sleep(1000)\n"
    )
    result = run(launcher, RANKS)
    assert result.exit_code == 124
    assert "first without progress reports" not in str(result.message["message"])


def test_a_stopped_silent_node_prints_the_stacks_of_its_ranks(patient: Launcher) -> None:
    (patient.directory / "script.py").write_text(
        "import time\ndef waiting_for_a_peer():\n"
        "    print('ready', flush=True)\n    time.sleep(1000)\nwaiting_for_a_peer()\n"
    )
    launched = patient.start(
        [patient.python, "script.py"],
        TORCHRUN_LAUNCHER="none",
        TORCHRUN_HANG_TIMEOUT_SECONDS="0.5",
        NODE_RANK="1",
    )
    assert launched.line() == "ready"
    with pytest.raises(subprocess.TimeoutExpired):
        launched.process.wait(2.5)
    launched.stop()
    result = launched.end()
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")
    assert " in waiting_for_a_peer" in result.err


def test_signal_handlers_of_the_user_stay(patient: Launcher) -> None:
    text = """
        import os, signal
        mine = []
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: mine.append(number))
            os.kill(os.getpid(), number)
        print("mine", *mine)
        while True: signal.pause()
    """
    result = run(patient, text)
    expected = f"mine {int(signal.SIGUSR1)} {int(signal.SIGUSR2)}\n"
    assert (result.exit_code, result.out) == (124, expected)
    assert "script.py" in result.err


# Waits after its output, and is the program of its process already before that.
WAITS = ["tail", "-f", "ready"]


def test_a_rank_that_is_no_python_program_is_reported(launcher: Launcher) -> None:
    script(launcher.directory, "ready", "ready")
    result = launcher.run(WAITS, TORCHRUN_HANG_TIMEOUT_SECONDS="0.5")
    assert result.exit_code == 124
    # It may not have got to sleep yet.
    assert re.search(r"no stack of tail\[\d+\], its state is [SR] \([a-z]+\)", result.err)


def test_a_program_that_replaced_a_python_program_gets_no_signal(launcher: Launcher) -> None:
    script(launcher.directory, "ready", "ready")
    result = run(launcher, f"import os; os.execvp('tail', {WAITS})")
    assert (result.exit_code, result.message["reason"]) == (124, "Hung"), "not killed by the signal"
    assert "no stack of tail[" in result.err


class Clock:
    now = 0.0


def test_a_rank_that_continues_after_the_stacks_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, dumps = Clock(), []
    monkeypatch.setattr(watchdogs.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(watchdogs, "write_stacks", dumps.append)
    watch = HangWatchdog(10, str(tmp_path), lambda: 0)
    beat = tmp_path / "beat.0"
    beat.write_text(".")
    os.utime(beat, (1, 1))
    assert watch.check() is None
    clock.now = 11
    assert watch.check() is None
    assert len(dumps) == 1
    beat.unlink()
    beat.write_text(".")
    os.utime(beat, (2, 2))
    clock.now = 15
    assert watch.check() is None, "a heartbeat"
    clock.now = 24
    assert watch.check() is None
    clock.now = 26
    assert watch.check() is None
    assert len(dumps) == 2
    clock.now = 30.9
    assert watch.check() is None
    clock.now = 31.1
    stop_request = watch.check()
    assert stop_request is not None
    assert stop_request.reason == "Hung"


def test_a_clock_that_is_set_back_hides_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, dumps = Clock(), []
    monkeypatch.setattr(watchdogs.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(watchdogs, "write_stacks", dumps.append)
    watch = HangWatchdog(10, str(tmp_path), lambda: 0)
    beats = [tmp_path / "beat.0", tmp_path / "beat.1"]
    for beat in beats:
        beat.write_text(".")
        os.utime(beat, (7200, 7200))
    assert watch.check() is None
    for clock.now in range(5, 35, 5):  # rank 1 has finished before
        os.utime(beats[0], (3600 + clock.now, 3600 + clock.now))
        assert watch.check() is None
    assert dumps == []
