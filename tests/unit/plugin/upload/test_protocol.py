"""The upload protocol without a network."""

import hashlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubectl_torchrun.cluster.backoff import PATIENT, Retries
from kubectl_torchrun.upload.protocol import (
    CHUNK,
    BuildArchive,
    GetState,
    PodReply,
    PutManifest,
    PutRange,
    Rejected,
    Sleep,
    Step,
    Stored,
    Upload,
)
from profiles import examples

WORK = hashlib.sha256(b"workspace").hexdigest()
BEFORE = hashlib.sha256(b"the one before").hexdigest()
SHA = hashlib.sha256(b"archive").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
SIZE = 3 * CHUNK + 5


MISSING = ((0, 1), (4, 4))


def started(backoff: Retries = Retries()) -> Upload:  # noqa: B008
    upload = Upload(WORK, 0.0, BEFORE, backoff)
    assert upload.next_step(0.0) == GetState()
    return upload


def ours(state: str, **more: Any) -> PodReply:
    return PodReply(state, workspace=WORK, missing=MISSING, **more)


def after(*answers: tuple[int, PodReply]) -> Step:
    upload = started()
    for status, answer in answers:
        step = upload.next_step(0.0)
        while isinstance(step, Sleep):
            step = upload.next_step(0.0)
        upload.on_response(status, answer, 0.0)
        if isinstance(upload._steps[0], BuildArchive):
            upload.on_archive(SHA, SIZE, 0.0)
            upload.on_response(200, answer, 0.0)
    return upload.next_step(0.0)


def sending(backoff: Retries = Retries()) -> Upload:  # noqa: B008
    """An upload that is about to send its archive from the start."""
    upload = started(backoff)
    upload.on_response(200, ours("waiting", offset=0), 0.0)
    assert upload.next_step(0.0) == BuildArchive((0, 1, 4))
    upload.on_archive(SHA, SIZE, 0.0)
    upload.on_response(200, ours("waiting", offset=0), 0.0)
    assert upload.next_step(0.0) == PutRange(0, CHUNK)
    return upload


NEW = (200, PodReply("waiting", offset=0))
WAITING = (200, ours("waiting", offset=0))
EXTRACTING = (200, ours("extracting", sha256=SHA, offset=SIZE))

# fmt: off
TABLE: list[tuple[str, list[tuple[int, PodReply]], Step]] = [
    ("a new pod", [NEW], PutManifest("")),
    ("a pod that has the one before", [(200, PodReply("waiting", base=BEFORE))], PutManifest(BEFORE)),
    ("a pod that has another", [(200, PodReply("waiting", base=OTHER))], PutManifest("")),
    ("a manifest that differs from what it has not",
     [(200, PodReply("waiting", base=BEFORE)), (409, PodReply(reason="ManifestNeeded"))], PutManifest("")),
    ("announced", [NEW, (202, PodReply("comparing"))], GetState()),
    ("a manifest refused", [NEW, (422, PodReply(reason="InvalidFile", message="m"))],
     Rejected("InvalidFile", "m")),
    ("everything is at hand", [(200, ours("done", revision=2))], Stored(2)),
    ("known what is missing", [WAITING], PutRange(0, CHUNK)),
    ("a pod that has a part", [(200, ours("receiving", sha256=SHA, offset=CHUNK))],
     PutRange(CHUNK, 2 * CHUNK)),
    ("a part of another archive", [(200, ours("receiving", sha256=OTHER, offset=CHUNK))],
     PutRange(0, CHUNK)),
    ("an earlier workspace refused", [(200, PodReply("failed", OTHER, 0, "Bad", "x"))], PutManifest("")),
    ("a range taken", [WAITING, (200, PodReply(offset=CHUNK))], PutRange(CHUNK, 2 * CHUNK)),
    ("the last range", [(200, ours("receiving", sha256=SHA, offset=3 * CHUNK))],
     PutRange(3 * CHUNK, SIZE)),
    ("another offset", [WAITING, (409, PodReply(offset=2 * CHUNK))], PutRange(2 * CHUNK, 3 * CHUNK)),
    ("complete", [WAITING, (202, PodReply("extracting"))], GetState()),
    ("extracted", [WAITING, (202, PodReply("extracting")), (200, ours("done", revision=1))], Stored(1)),
    ("not what was announced",
     [WAITING, (202, PodReply("extracting")),
      (200, ours("failed", reason="WrongArchive", message="x changed"))],
     Rejected("WrongArchive", "x changed")),
    ("not wanted", [NEW, (422, PodReply(reason="WrongArchive", message="m"))],
     Rejected("WrongArchive", "m")),
    ("too large", [WAITING, (413, PodReply(reason="WorkspaceTooLarge", message="m"))],
     Rejected("WorkspaceTooLarge", "m")),
    ("no space", [WAITING, (507, PodReply(reason="WorkspaceFull", message="m"))],
     Rejected("WorkspaceFull", "m")),
]
# fmt: on


@pytest.mark.parametrize(
    ("answers", "step"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_what_comes_next(answers: list[tuple[int, PodReply]], step: Step) -> None:
    assert after(*answers) == step


def test_a_whole_manifest_that_is_refused_is_sent_again_after_a_pause() -> None:
    upload = started()
    upload.on_response(*NEW, 0.0)
    for _ in range(2):
        assert upload.next_step(0.0) == PutManifest("")
        upload.on_response(409, PodReply(reason="ManifestNeeded", message="m"), 0.0)
        assert isinstance(upload.next_step(0.0), Sleep)
        assert upload.next_step(0.0) == GetState()
        upload.on_response(*NEW, 0.0)
    upload.on_response(409, PodReply(reason="ManifestNeeded", message="m"), 0.0)
    assert isinstance(upload.next_step(PATIENT.give_up + 1), Rejected)


@pytest.mark.parametrize("state", ["comparing", "extracting", "done"])
def test_the_upload_waits_while_a_pod_creates_another_workspace(state: str) -> None:
    assert isinstance(after((200, PodReply(state, OTHER, 7))), Sleep)


def test_files_that_turn_out_to_be_missing_are_packed() -> None:
    upload = sending()
    upload.on_response(202, PodReply("extracting"), 0.0)
    upload.on_response(200, PodReply("waiting", workspace=WORK, missing=((2, 2),)), 0.0)
    assert upload.next_step(0.0) == BuildArchive((2,))


def test_an_unknown_state_ends_the_upload() -> None:
    assert isinstance(after((200, PodReply("resting", "", 0))), Rejected)


def test_a_damaged_upload_restarts_a_bounded_number_of_times() -> None:
    bad = (422, PodReply(reason="DigestMismatch", message="digest is wrong", offset=0))
    twice = [WAITING, bad, WAITING, bad]
    assert isinstance(after(*twice), Sleep)
    step = after(*twice, WAITING, bad)
    assert isinstance(step, Rejected)
    assert "3 times" in step.message


def test_after_a_lost_connection_it_backs_off_and_reads_the_offset() -> None:
    upload = started()
    waits = []
    for _ in range(8):
        upload.on_failure("cut", 0.0)
        step = upload.next_step(0.0)
        assert isinstance(step, Sleep)
        waits.append(step.seconds)
        assert upload.next_step(0.0) == GetState()
    assert waits[0] <= 0.5
    assert all(0.5 * min(15, 0.5 * 2**n) <= wait <= 15 for n, wait in enumerate(waits))


def test_a_longer_retry_after_is_honoured() -> None:
    upload = started()
    upload.on_failure("busy", 0.0, retry_after=7.0)
    assert upload.next_step(0.0) == Sleep(7.0)


def test_without_progress_it_gives_up_with_a_reason() -> None:
    upload = started(backoff=Retries(give_up=60))
    upload.on_failure("connection refused", 59.0)
    assert isinstance(upload.next_step(59.0), Sleep)
    step = upload.next_step(61.0)
    assert isinstance(step, Rejected)
    assert "connection refused" in step.message
    assert upload.next_step(100.0) == step


def test_progress_and_a_missing_pod_extend_the_timeout() -> None:
    upload = sending(Retries(give_up=60))
    upload.on_response(200, PodReply(offset=CHUNK), 55.0)
    assert upload.next_step(110.0) == PutRange(CHUNK, 2 * CHUNK)
    upload.add_idle_time(1000.0)
    assert upload.next_step(1110.0) == PutRange(CHUNK, 2 * CHUNK)


@pytest.mark.parametrize("state", ["comparing", "extracting"])
def test_work_of_the_pod_extends_the_timeout(state: str) -> None:
    upload = started(Retries(give_up=60))
    for now in range(0, 600, 50):
        assert upload.next_step(now) == GetState()
        upload.on_response(200, ours(state, progress=now), now)
        assert isinstance(upload.next_step(now), Sleep)


@pytest.mark.parametrize("state", ["comparing", "extracting"])
@pytest.mark.parametrize("progress", [0, 7], ids=["an older pod", "a pod that stands still"])
def test_a_pod_without_progress_is_given_up(state: str, progress: int) -> None:
    upload = started(Retries(give_up=60))
    upload.on_response(200, ours(state, progress=progress), 1.0)
    assert isinstance(upload.next_step(1.0), Sleep)
    upload.on_response(200, ours(state, progress=progress), 50.0)
    assert isinstance(upload.next_step(60.0), Sleep)
    assert isinstance(upload.next_step(62.0), Rejected)


def test_a_pod_that_never_moves_the_offset_is_given_up() -> None:
    upload, now = sending(Retries(give_up=60)), 0.0
    for _ in range(1000):
        step = upload.next_step(now)
        if isinstance(step, Rejected):
            return
        if isinstance(step, Sleep):
            now += step.seconds
        else:
            status = 409 if isinstance(step, PutRange) else 200
            upload.on_response(status, ours("waiting", offset=0), now)
    raise AssertionError("it goes on for ever")


@dataclass
class Pod:
    """The pod's side of the protocol, as in its contract."""

    data: bytes
    held: bytearray = field(default_factory=bytearray)
    state: str = "waiting"
    announced: bool = False

    def ask(self) -> tuple[int, PodReply]:
        if self.state == "extracting":
            self.state = "done"
            return 200, ours("extracting", sha256=SHA, offset=len(self.data))
        sha = SHA if self.held else ""
        workspace = WORK if self.announced else ""
        missing = MISSING if self.announced else ()
        return 200, PodReply(
            self.state, sha, len(self.held), workspace=workspace, missing=missing, revision=1
        )

    def put(self, step: PutRange, damaged: bool) -> tuple[int, PodReply]:
        if step.start != len(self.held):
            return 409, PodReply(offset=len(self.held))
        part = self.data[step.start : step.stop]
        self.held += bytes(len(part)) if damaged else part
        self.state = "receiving"
        if len(self.held) < len(self.data):
            return 200, PodReply(offset=len(self.held))
        if self.held != self.data:
            self.held.clear()
            self.state = "waiting"
            return 422, PodReply(reason="DigestMismatch", message="wrong", offset=0)
        self.state = "extracting"
        return 202, PodReply("extracting")


@examples(60)
@given(st.integers(1, 3 * CHUNK), st.floats(0, 0.6), st.randoms(use_true_random=False))
def test_the_archive_arrives_whatever_messages_are_lost(
    size: int, loss: float, random: Random
) -> None:
    pod = Pod(b"x" * size)
    upload, now = Upload(WORK, 0.0, backoff=Retries(give_up=1e9)), 0.0
    damages = 2
    for _ in range(5000):
        step = upload.next_step(now)
        match step:
            case Stored():
                assert pod.held == pod.data
                return
            case Rejected(reason):
                raise AssertionError(reason)
            case Sleep(seconds):
                now += seconds
            case BuildArchive():
                upload.on_archive(SHA, size, now)
            case GetState() | PutRange() | PutManifest():
                if random.random() < loss:  # the request gets lost
                    upload.on_failure("cut", now)
                    continue
                if isinstance(step, GetState):
                    status, answer = pod.ask()
                elif isinstance(step, PutManifest):
                    pod.announced = True
                    status, answer = 202, PodReply("comparing")
                else:
                    damaged = damages > 0 and random.random() < loss / 10
                    damages -= damaged
                    if random.random() < loss:  # only half of the range arrives
                        half = PutRange(step.start, (step.start + step.stop) // 2)
                        if half.start < half.stop:
                            pod.put(half, damaged)
                        upload.on_failure("cut", now)
                        continue
                    status, answer = pod.put(step, damaged)
                if random.random() < loss:  # the response gets lost
                    upload.on_failure("cut", now)
                else:
                    upload.on_response(status, answer, now)
    raise AssertionError("it never ends")
