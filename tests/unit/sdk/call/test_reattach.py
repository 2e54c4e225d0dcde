"""Kept results: of the wanted call alone, whatever else is in the state directory."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import torchrun_sdk as kt
from torchrun_sdk import cli
from torchrun_sdk.call import reattach
from torchrun_sdk.call import state as call_state
from torchrun_sdk.call.gang import Gang
from torchrun_sdk.call.monitor import CallMonitor
from torchrun_sdk.call.state import CallLimits, CallState
from torchrun_sdk.cluster import kubectl
from torchrun_sdk.cluster.kubectl import Kubectl
from torchrun_sdk.serialization import pack, unpack
from torchrun_sdk.spec import (
    RAISED,
    Call,
    Frame,
    Raised,
    Reference,
    Result,
    Started,
    encode,
)

from ..pods import replace_text

SUCCEEDED = {"phase": "Succeeded"}


@pytest.fixture
def store(cluster: Path) -> Callable[[str, Frame], None]:
    """Store the frame of a rank that has ended."""

    def store(call: str, left: Frame, world: int = 1) -> None:
        folder = cluster / "state" / "sdk" / call
        folder.mkdir(parents=True, exist_ok=True)
        started = Started(left.rank, world, "a", 1, 1.0)
        (folder / f"{left.rank}.started").write_text(encode(started))
        (folder / f"{left.rank}.left").write_text(encode(left))

    return store


def returned(rank: int, value: object) -> Result:
    return Result(rank, "a", pack(value, "json", "x"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["0.left.4711", "0.left.new", "notes.txt", "0.log"])
def test_other_files_hide_no_results(cluster: Path, store: Callable[..., None], name: str) -> None:
    store("c1", returned(0, 41))
    store("c2", returned(0, 42))
    for call in ("c1", "c2"):
        (cluster / "state" / "sdk" / call / name).write_text('{"kind": "Result", "rank": 0, "no')
    (cluster / "state" / "sdk" / "c3").mkdir()
    (cluster / "state" / "sdk" / "c3" / name).write_text("{")
    (result,) = reattach.kept_results("j", Kubectl(), SUCCEEDED)
    assert unpack(result.value) == 42


@pytest.mark.long
def test_unreadable_results_of_earlier_calls_do_not_matter(
    cluster: Path, store: Callable[..., None]
) -> None:
    store("c1", returned(0, 41))
    store("c2", returned(0, 42))
    (cluster / "state" / "sdk" / "c1" / "0.left").write_text('{"kind"')
    for call in ("", "c2"):
        (result,) = reattach.kept_results("j", Kubectl(), SUCCEEDED, call)
        assert unpack(result.value) == 42
    with pytest.raises(kt.ProtocolError):
        reattach.kept_results("j", Kubectl(), SUCCEEDED, "c1")


@pytest.mark.long
def test_the_limit_of_a_value_is_not_that_of_all_ranks(
    cluster: Path, store: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubectl, "LONGEST_LINE", 1000)
    monkeypatch.setattr(kubectl, "_LONGEST_OUTPUT", 2000)
    for rank in range(8):
        store("c1", returned(rank, "x" * 600), 8)
    results = reattach.kept_results("j", Kubectl(), SUCCEEDED)
    assert [len(unpack(result.value)) for result in results] == [600] * 8
    store("c1", returned(0, "x" * 1200), 8)
    with pytest.raises(kt.ProtocolError):
        reattach.kept_results("j", Kubectl(), SUCCEEDED)


FAILURE = {"reason": "Exception", "exitCode": RAISED, "rank": 0, "node": "a", "message": "code 86"}
FAILED = {"phase": "Failed", "reason": "Failed", "message": "rank 0 failed", "lastFailure": FAILURE}
BAD = Raised(0, "a", 2.0, "builtins.ValueError", "bad batch", "Traceback ...")


@pytest.fixture
def failed(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster with a job that has failed, and no pods any more."""
    monkeypatch.setattr(call_state, "_LATE", 0.1)  # there are no connections to wait for
    metadata = {"name": "j", "uid": "u1", "labels": {"torchrun.ai/sdk": "function"}}
    replace_text(cluster / "job.json", json.dumps({"metadata": metadata, "status": FAILED}))
    return cluster


def follow(call: str = "c1") -> list[Result]:
    """Follow a call whose job fails while the client has no connection to the pods."""
    state = CallState("j", CallLimits(100, 100), time.monotonic())
    gang = Gang("j", kt.Compute(), Path(), print, created=True)
    called = Call(call, Reference("f"), pack([[], {}], "json", "x"))
    try:
        return CallMonitor(Kubectl(), state, call, print).run(None)
    except kt.CallError as error:
        return gang._kept_results_after(error, called, state)


def attach() -> list[Result]:
    return reattach._results("j", Kubectl(), {"phase": "Running"}, None, print, None, stays=False)


@pytest.mark.long
@pytest.mark.parametrize("client", [follow, attach])
def test_an_exception_is_kept_for_a_client_that_was_disconnected(
    failed: Path, store: Callable[..., None], client: Callable[[], list[Result]]
) -> None:
    store("c1", BAD)
    with pytest.raises(kt.RemoteException, match="ValueError: bad batch"):
        client()


@pytest.mark.long
@pytest.mark.parametrize("client", [follow, attach])
@pytest.mark.parametrize("reason", ["no files", "unreadable", "other call"])
def test_without_a_kept_exception_the_status_of_the_job_is_the_error(
    failed: Path, store: Callable[..., None], client: Callable[[], list[Result]], reason: str
) -> None:
    if reason == "unreadable":
        store("c1", BAD)
        (failed / "state" / "sdk" / "c1" / "0.left").write_text('{"kind"')
    elif reason == "other call":
        store("c0", returned(0, 1))
        if client is attach:
            (failed / "state" / "sdk" / "c0" / "0.left").unlink()
    with pytest.raises(kt.JobFailed, match="Exception: code 86"):
        client()


@pytest.mark.parametrize(
    ("status", "deleted", "may"),
    [
        (FAILED, False, True),
        (FAILED, True, False),
        ({"phase": "Running"}, False, False),
        ({"phase": "Failed", "lastFailure": {"exitCode": 137}}, False, False),
        ({"phase": "Succeeded"}, False, True),
    ],
)
def test_the_state_directory_is_read_if_ranks_have_written_to_it(
    status: dict, deleted: bool, may: bool
) -> None:
    state = CallState("j", CallLimits(100, 100), 0.0)
    state.job_changed(status, 1.0)
    if deleted:
        state.job_deleted(2.0)
    assert state.may_have_kept_frames == may


@pytest.mark.long
def test_an_app_has_no_results_to_wait_for(cluster: Path) -> None:
    metadata = {"name": "ddp-1", "uid": "u1", "labels": {"torchrun.ai/sdk": "app"}}
    body = {"metadata": metadata, "status": {"phase": "Running"}}
    replace_text(cluster / "job.json", json.dumps(body))
    with pytest.raises(kt.UsageError, match="kt logs ddp-1"):
        kt.attach("ddp-1")
    assert cli.main(["results", "ddp-1"]) == 2
