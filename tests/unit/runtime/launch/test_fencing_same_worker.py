"""The fence of a pod that has the attempt and the index of an earlier one.

A Job that resumes creates such a pod. The next gang knows both by one registration.
"""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch import fencing
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.fencing import FencingWatchdog, GangId, OlderWorker, take_over

OLD, NEW = GangId("uid", 1), GangId("uid", 2)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """At the end of the test, a newer epoch ends the watchdogs. A busy disk may answer late."""
    monkeypatch.setattr(fencing, "_ANSWER_SECONDS", 1000.0)
    folder = tmp_path / "state"
    folder.mkdir()
    yield str(folder)
    (folder / "epoch").write_text('{"attempt": 1000, "job": "uid"}')


def begin(
    state: str,
    gang: GangId,
    *unfenced: OlderWorker,
    index: str = "0",
    failed_state: str = "",
) -> FencingWatchdog | None:
    return take_over(
        state,
        gang,
        index,
        list(unfenced),
        lambda stop_request: None,
        wait=0.0,
        failed_state=failed_state,
    )


def fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing can be written."""

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fencing, "_write", write)


def test_a_pod_that_cannot_watch_does_not_start_on_the_registration_of_an_earlier_one(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(state, OLD)
    fill_up(monkeypatch)
    with pytest.raises(LaunchError) as caught:
        begin(state, OLD)
    assert caught.value.reason == "Fenced"
    assert f"the state directory {state} failed: [Errno 28] No space left" in caught.value.message


def test_nor_does_one_whose_state_directory_could_not_be_used_at_all(state: str) -> None:
    begin(state, OLD)
    with pytest.raises(LaunchError) as caught:
        begin("", OLD, failed_state=state)
    assert caught.value.reason == "Fenced"
    assert f"the state directory {state} failed." in caught.value.message


def test_a_pod_without_an_earlier_one_starts_and_stays_unproven(
    state: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin(state, OLD, index="1")
    with monkeypatch.context() as full:
        fill_up(full)
        assert begin(state, OLD) is None
    assert "running without the fence" in capfd.readouterr().err
    assert begin("", OLD, failed_state=state) is None
    with pytest.raises(LaunchError) as caught:
        begin(state, NEW, OlderWorker(1, 0))
    assert caught.value.reason == "FenceUnproven"


def test_an_earlier_pod_of_another_attempt_does_not_matter(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(state, OLD)
    fill_up(monkeypatch)
    assert begin(state, NEW) is None


@pytest.mark.parametrize("harm", ["failed", "hung"])
def test_storage_that_shows_no_registrations_stops_no_pod(
    state: str, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """On slow storage, all pods of a large gang would fail again and again."""
    release = threading.Event()
    if harm == "failed":
        Path(state, "watchers").touch()
    else:
        monkeypatch.setattr(fencing, "_ANSWER_SECONDS", 0.1)
        monkeypatch.setattr(fencing, "_is_registered", lambda *_: release.wait())
    try:
        assert begin("", OLD, failed_state=state) is None
    finally:
        release.set()


def test_a_pod_that_cannot_register_leaves_nothing_behind(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_up(monkeypatch)
    assert begin(state, OLD) is None
    assert os.listdir(state) == []


def test_without_a_state_directory_there_is_nothing_to_check() -> None:
    assert begin("", OLD) is None


def test_a_state_directory_that_cannot_be_used_proves_nothing_about_older_workers(
    state: str,
) -> None:
    """They may be registered there. The next gang can fence them once the storage works."""
    begin(state, OLD)
    with pytest.raises(LaunchError) as caught:
        begin("", NEW, OlderWorker(1, 0), failed_state=state)
    assert caught.value.reason == "Fenced"
    assert "Cannot fence older workers" in caught.value.message
