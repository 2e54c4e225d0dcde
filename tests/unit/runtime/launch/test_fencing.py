"""The fence: a replaced gang kills its ranks, and the next gang waits until it has done so."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchrun_runtime.launch import fencing, supervise
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.fencing import FencingWatchdog, GangId, OlderWorker, take_over
from torchrun_runtime.launch.podinfo import pass_gate
from torchrun_runtime.launch.supervise import StopRequest
from unit.runtime.launching import Launcher

OLD, NEW = GangId("uid", 1), GangId("uid", 2)
HUGE = 1000.0
RUNTIME = Path(fencing.__file__).parents[2]


class Ends:
    """Records stop requests instead of ending the process."""

    def __init__(self) -> None:
        self.requests: list[StopRequest] = []
        self.called = threading.Event()

    def __call__(self, stop_request: StopRequest) -> None:
        self.requests.append(stop_request)
        self.called.set()


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that a test leaves running ends with its directory, and must not end pytest."""
    monkeypatch.setattr(fencing, "_END_SECONDS", 0.2)
    monkeypatch.setattr(fencing, "_ANSWER_SECONDS", HUGE)


def begin(
    state: str, gang: GangId, *unfenced: OlderWorker, index: str = "0", wait: float = 0.0
) -> None:
    watchdog = take_over(state, gang, index, list(unfenced), lambda stop_request: None, wait)
    assert watchdog is not None


def watchdog_of(
    state: str, gang: GangId, ends: Ends, fence: float = HUGE, notice: float = 0.05
) -> FencingWatchdog:
    fencing._write(state, "epoch", gang)
    return FencingWatchdog(state, gang, ends, fence, poll=0.01, notice_seconds=notice)


def test_a_gang_writes_its_epoch_and_registers_its_watchdog(state: str) -> None:
    begin(state, OLD, index="3")
    assert json.loads(Path(state, "epoch").read_text()) == {"attempt": 1, "job": "uid"}
    assert os.listdir(Path(state, "watchers")) == ["uid.1.3"]
    assert stat.S_IMODE(Path(state, "epoch").stat().st_mode) == 0o666


def test_a_launcher_without_an_index_registers_as_the_first_worker(state: str) -> None:
    begin(state, OLD, index="")
    assert os.listdir(Path(state, "watchers")) == ["uid.1.0"]


def test_a_newer_epoch_is_the_end(state: str, ends: Ends) -> None:
    watchdog = watchdog_of(state, OLD, ends)
    assert watchdog.check() is None
    fencing._write(state, "epoch", NEW)
    assert ends.called.wait(60), (
        "no check reads the request, so the watchdog ends the process itself"
    )
    assert ends.requests[0].reason == "Fenced"
    assert "Attempt 2" in ends.requests[0].message


def test_a_check_that_reads_the_request_gets_time_to_end(
    state: str, ends: Ends, monkeypatch
) -> None:
    monkeypatch.setattr(fencing, "_END_SECONDS", HUGE)
    watchdog = watchdog_of(state, OLD, ends, notice=HUGE)
    fencing._write(state, "epoch", NEW)
    pause = threading.Event()
    while watchdog.check() is None:
        pause.wait(0.005)
    assert watchdog._noticed.is_set()
    watchdog.on_stop(leaving=True)
    assert not ends.called.wait(0.3)


def test_a_check_before_the_newer_epoch_gives_no_time_to_end(
    state: str, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog waits only for a main thread that has read the stop request."""
    monkeypatch.setattr(fencing, "_END_SECONDS", HUGE)
    watchdog = watchdog_of(state, OLD, ends)
    assert watchdog.check() is None
    fencing._write(state, "epoch", NEW)
    assert ends.called.wait(60)


def test_another_jobs_epoch_is_the_end(state: str, ends: Ends) -> None:
    watchdog_of(state, OLD, ends)
    fencing._write(state, "epoch", GangId("another", 0))
    assert ends.called.wait(60)
    assert "Another job" in ends.requests[0].message


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        ("removed", "epoch is gone. Do not empty or replace TORCHRUN_STATE_DIR in the command"),
        ("torn", "epoch is damaged"),
        ("hung", "it does not respond"),
    ],
)
def test_storage_without_an_answer_is_the_end(
    state: str, ends: Ends, harm: str, cause: str
) -> None:
    path = Path(state, "epoch")
    watchdog_of(state, OLD, ends, fence=0.3)
    # At once: the watchdog must not see the file gone before it is replaced.
    replacement = path.with_name("replacement")
    if harm == "torn":
        replacement.write_text('{"attempt"')
    if harm == "hung":
        os.mkfifo(replacement)  # open() blocks until there is a writer
    if harm == "removed":
        path.unlink()
    else:
        replacement.replace(path)
    assert ends.called.wait(60)
    assert cause in ends.requests[0].message


def test_storage_that_hangs_from_the_first_read_on_is_the_end(state: str, ends: Ends) -> None:
    os.mkfifo(Path(state, "epoch"))
    FencingWatchdog(state, OLD, ends, fence=0.3, poll=0.01, notice_seconds=0.05)
    assert ends.called.wait(60)
    assert "The state directory" in ends.requests[0].message


def test_a_short_silence_is_not_the_end(state: str, ends: Ends) -> None:
    watchdog_of(state, OLD, ends, fence=HUGE)
    Path(state, "epoch").unlink()
    assert not ends.called.wait(0.2)


def test_a_late_write_of_an_older_gang_is_overwritten(state: str, ends: Ends) -> None:
    watchdog_of(state, NEW, ends)
    fencing._write(state, "epoch", OLD)
    pause = threading.Event()
    while fencing.read(state, "epoch") != NEW:
        pause.wait(0.005)
    assert not ends.called.is_set()


def test_a_gang_that_comes_too_late_does_not_start(state: str) -> None:
    begin(state, NEW)
    with pytest.raises(LaunchError) as caught:
        begin(state, OLD)
    assert caught.value.reason == "Fenced"
    assert fencing.read(state, "epoch") == NEW


def test_the_epoch_of_an_earlier_job_is_ignored(state: str) -> None:
    begin(state, GangId("another", 7))
    begin(state, OLD)
    assert os.listdir(Path(state, "watchers")) == ["uid.1.0"], "and its registrations are removed"


def test_only_the_registrations_of_older_gangs_are_removed(state: str) -> None:
    begin(state, OLD, index="1")
    later = Path(state, "watchers", "uid.3.0")
    later.touch()
    begin(state, NEW, index="1")
    assert sorted(os.listdir(later.parent)) == ["uid.1.1", "uid.2.1", "uid.3.0"]
    begin(state, NEW, index="0")
    assert sorted(os.listdir(later.parent)) == ["uid.2.0", "uid.2.1", "uid.3.0"]


def test_the_next_gang_may_register_as_another_user(state: str) -> None:
    mask = os.umask(0)
    try:
        begin(state, OLD)
    finally:
        os.umask(mask)
    folder = Path(state, "watchers")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / "uid.1.0").stat().st_mode) == 0o666


def test_a_worker_to_fence_must_have_registered_its_watchdog(state: str) -> None:
    begin(state, OLD, index="0")
    with pytest.raises(LaunchError) as caught:
        begin(state, NEW, OlderWorker(1, 0), OlderWorker(1, 1))
    assert caught.value.reason == "FenceUnproven"
    assert "Worker 1 of attempt 1" in caught.value.message
    assert fencing.read(state, "epoch") == OLD


def test_the_fence_is_waited_out_once(state: str, capfd: pytest.CaptureFixture[str]) -> None:
    begin(state, OLD, index="1")
    began = time.monotonic()
    begin(state, NEW, OlderWorker(1, 1), wait=0.5)
    assert time.monotonic() - began >= 0.5
    assert "until workers of older gangs are fenced" in capfd.readouterr().err
    begin(state, GangId("uid", 3), OlderWorker(1, 1), wait=HUGE)
    assert "fenced" not in capfd.readouterr().err


@pytest.mark.parametrize("passed", ['{"attempt": 7, "job": "another"}', '{"attempt"'])
def test_a_wait_of_another_job_does_not_count(
    state: str, capfd: pytest.CaptureFixture[str], passed: str
) -> None:
    begin(state, OLD)
    Path(state, "passed").write_text(passed)
    begin(state, NEW, OlderWorker(1, 0), wait=0.2)
    assert "until workers of older gangs are fenced" in capfd.readouterr().err


def test_a_gang_that_is_overtaken_as_it_starts_does_not_start(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = fencing._write

    def overtaken(state: str, name: str, gang: GangId) -> None:
        write(state, name, gang)
        write(state, name, NEW)

    monkeypatch.setattr(fencing, "_write", overtaken)
    with pytest.raises(LaunchError) as caught:
        begin(state, OLD)
    assert caught.value.reason == "Fenced"


def test_a_silence_as_long_as_the_fence_is_not_yet_the_end(
    state: str, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "now", lambda: HUGE)
    watchdog_of(state, OLD, ends, fence=0.0)
    assert not ends.called.wait(0.3)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"job": 1, "attempt": "x"}', b"[" * 4096])
def test_an_incomplete_file_names_no_gang(state: str, content: bytes) -> None:
    Path(state, "epoch").write_bytes(content)
    assert fencing.read(state, "epoch") is None


def test_reading_and_writing_leave_no_file_open(state: str) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        fencing._write(state, "epoch", OLD)
        fencing.read(state, "epoch")
    # Threads of other tests' watches have a few for a moment.
    assert len(os.listdir("/proc/self/fd")) < opened + 100


def test_the_next_gang_waits_until_the_slowest_watch_has_ended_its_ranks() -> None:
    """docs/troubleshooting.md and docs/design.md say 30 s and 45 s."""
    assert (fencing.FENCE_SECONDS, fencing.WAIT_SECONDS) == (30.0, 45.0)
    slowest = fencing.FENCE_SECONDS + fencing._ENFORCE_SECONDS + fencing._NOTICE_SECONDS + 8.0
    assert slowest < fencing.WAIT_SECONDS
    assert supervise._IDLE < fencing._NOTICE_SECONDS
    assert fencing.POLL_SECONDS < fencing.FENCE_SECONDS / 2, "one failed read is not the end"


def test_no_fence_without_storage(state: str) -> None:
    assert take_over("", NEW, "0", [], lambda stop_request: None) is None
    with pytest.raises(LaunchError) as caught:
        take_over("", NEW, "0", [OlderWorker(1, 0)], lambda stop_request: None)
    assert caught.value.reason == "FenceUnproven"


def test_a_first_gang_starts_despite_failed_storage(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert take_over(missing, NEW, "0", [], lambda stop_request: None) is None
    assert "running without the fence" in capfd.readouterr().err


def test_failed_storage_at_the_start_proves_no_fence(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_ANSWER_SECONDS", 0.5)
    os.mkfifo(Path(state, "epoch"))
    with pytest.raises(LaunchError) as caught:
        take_over(state, NEW, "0", [OlderWorker(1, 0)], lambda stop_request: None)
    assert caught.value.reason == "Fenced"
    assert "Cannot fence older workers" in caught.value.message


def test_files_of_another_user_are_written_in_place(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fencing._write(state, "epoch", GangId("uid", 1000))

    def refuse(*_: str) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "replace", refuse)
    fencing._write(state, "epoch", OLD)
    assert fencing.read(state, "epoch") == OLD
    assert os.listdir(state) == ["epoch"]


def test_an_epoch_is_on_the_disk_before_others_can_read_it(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def record(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments: object) -> object:
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(os, name, call)

    record("fsync")
    record("replace")
    fencing._write(state, "epoch", NEW)
    assert calls == ["fsync", "replace"]


def test_a_failed_write_leaves_the_old_content(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fencing._write(state, "epoch", OLD)

    def fail(*_: str) -> None:
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no answer"):
        fencing._write(state, "epoch", NEW)
    assert fencing.read(state, "epoch") == OLD
    assert os.listdir(state) == ["epoch"]


def test_the_fence_annotation_is_read_with_the_go_ahead(tmp_path: Path) -> None:
    annotations = tmp_path / "annotations"
    order = 'torchrun.ai/fence="2026-01-02T03:04:05Z 0:1 1:3-5,12"'
    annotations.write_text(f'torchrun.ai/start="2"\n{order}\n')
    assert pass_gate(str(annotations), "2") == [
        OlderWorker(0, 1),
        *(OlderWorker(1, index) for index in (3, 4, 5, 12)),
    ]
    annotations.write_text('torchrun.ai/start="2"\n')
    assert pass_gate(str(annotations), "2") == []
    assert pass_gate("", "2") == []


@pytest.mark.long
def test_the_launcher_kills_its_ranks_when_a_newer_gang_starts(launcher: Launcher) -> None:
    state = launcher.directory / "state"
    state.mkdir()
    gang = {"TORCHRUN_JOB_UID": "uid", "TORCHRUN_ATTEMPT": "1", "NODE_RANK": "0"}
    launched = launcher.start(
        "echo runs; trap '' TERM; sleep 100", TORCHRUN_STATE_DIR=str(state), **gang
    )
    assert launched.line() == "runs"
    assert (state / "watchers" / "uid.1.0").exists()
    fencing._write(str(state), "epoch", NEW)
    result = launched.end()
    assert result.exit_code == 125
    assert result.message["reason"] == "Fenced"
    assert "Attempt 2 of this job has taken over" in str(result.message["message"])


@pytest.mark.long
def test_the_launcher_does_not_start_a_replaced_gang(launcher: Launcher) -> None:
    state = launcher.directory / "state"
    state.mkdir()
    fencing._write(str(state), "epoch", NEW)
    gang = {"TORCHRUN_JOB_UID": "uid", "TORCHRUN_ATTEMPT": "1"}
    result = launcher.run("echo runs", TORCHRUN_STATE_DIR=str(state), **gang)
    assert (result.exit_code, result.out) == (125, "")
    assert result.message["reason"] == "Fenced"


RESTING = """
import sys, time
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch.fencing import FencingWatchdog, GangId

FencingWatchdog({state!r}, GangId("uid", 1), print, poll=0.5)
start, used = time.monotonic(), time.process_time()
time.sleep(1.0)
print((time.process_time() - used) / (time.monotonic() - start) < 0.2)
"""


@pytest.mark.long
def test_the_watchdog_rests_between_reads(state: str) -> None:
    """Busy threads would take a core from the ranks."""
    script = RESTING.format(runtime=str(RUNTIME), state=state)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
