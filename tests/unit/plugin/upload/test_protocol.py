"""The upload protocol without a network."""

import hashlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubectl_torchrun.cluster.backoff import Backoff
from kubectl_torchrun.upload.protocol import (
    CHUNK,
    Announce,
    Answer,
    Ask,
    Done,
    Pack,
    Refused,
    Send,
    Step,
    Upload,
    Wait,
)
from profiles import examples

WORK = hashlib.sha256(b"workspace").hexdigest()
BEFORE = hashlib.sha256(b"the one before").hexdigest()
SHA = hashlib.sha256(b"archive").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
SIZE = 3 * CHUNK + 5


MISSING = ((0, 1), (4, 4))


def started(backoff: Backoff = Backoff()) -> Upload:  # noqa: B008
    upload = Upload(WORK, 0.0, BEFORE, backoff)
    assert upload.next_step(0.0) == Ask()
    return upload


def ours(state: str, **more: Any) -> Answer:
    return Answer(state, workspace=WORK, missing=MISSING, **more)


def after(*answers: tuple[int, Answer]) -> Step:
    upload = started()
    for status, answer in answers:
        step = upload.next_step(0.0)
        while isinstance(step, Wait):
            step = upload.next_step(0.0)
        upload.answered(status, answer, 0.0)
        if isinstance(upload._steps[0], Pack):
            upload.packed(SHA, SIZE, 0.0)
            upload.answered(200, answer, 0.0)
    return upload.next_step(0.0)


def sending(backoff: Backoff = Backoff()) -> Upload:  # noqa: B008
    """An upload whose archive is to be sent from its start."""
    upload = started(backoff)
    upload.answered(200, ours("waiting", offset=0), 0.0)
    assert upload.next_step(0.0) == Pack((0, 1, 4))
    upload.packed(SHA, SIZE, 0.0)
    upload.answered(200, ours("waiting", offset=0), 0.0)
    assert upload.next_step(0.0) == Send(0, CHUNK)
    return upload


NEW = (200, Answer("waiting", offset=0))
WAITING = (200, ours("waiting", offset=0))
EXTRACTING = (200, ours("extracting", sha256=SHA, offset=SIZE))

# fmt: off
TABLE: list[tuple[str, list[tuple[int, Answer]], Step]] = [
    ("a new pod", [NEW], Announce("")),
    ("a pod that has the one before", [(200, Answer("waiting", base=BEFORE))], Announce(BEFORE)),
    ("a pod that has another", [(200, Answer("waiting", base=OTHER))], Announce("")),
    ("a manifest that differs from what it has not",
     [(200, Answer("waiting", base=BEFORE)), (409, Answer(reason="UnknownBase"))], Announce("")),
    ("announced", [NEW, (202, Answer("comparing"))], Ask()),
    ("a manifest refused", [NEW, (422, Answer(reason="UnsafeName", message="m"))],
     Refused("UnsafeName", "m")),
    ("everything is at hand", [(200, ours("done", revision=2))], Done(2)),
    ("known what is missing", [WAITING], Send(0, CHUNK)),
    ("a pod that has a part", [(200, ours("receiving", sha256=SHA, offset=CHUNK))],
     Send(CHUNK, 2 * CHUNK)),
    ("a part of another archive", [(200, ours("receiving", sha256=OTHER, offset=CHUNK))],
     Send(0, CHUNK)),
    ("an earlier workspace refused", [(200, Answer("failed", OTHER, 0, "Bad", "x"))], Announce("")),
    ("a range taken", [WAITING, (200, Answer(offset=CHUNK))], Send(CHUNK, 2 * CHUNK)),
    ("the last range", [(200, ours("receiving", sha256=SHA, offset=3 * CHUNK))],
     Send(3 * CHUNK, SIZE)),
    ("another offset", [WAITING, (409, Answer(offset=2 * CHUNK))], Send(2 * CHUNK, 3 * CHUNK)),
    ("complete", [WAITING, (202, Answer("extracting"))], Ask()),
    ("extracted", [WAITING, (202, Answer("extracting")), (200, ours("done", revision=1))], Done(1)),
    ("not what was announced",
     [WAITING, (202, Answer("extracting")),
      (200, ours("failed", reason="NotAnnounced", message="x changed"))],
     Refused("NotAnnounced", "x changed")),
    ("not wanted", [NEW, (422, Answer(reason="WrongArchive", message="m"))],
     Refused("WrongArchive", "m")),
    ("too large", [WAITING, (413, Answer(reason="ArchiveTooLarge", message="m"))],
     Refused("ArchiveTooLarge", "m")),
    ("no space", [WAITING, (507, Answer(reason="WorkspaceFull", message="m"))],
     Refused("WorkspaceFull", "m")),
]
# fmt: on


@pytest.mark.parametrize(
    ("answers", "step"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_what_comes_next(answers: list[tuple[int, Answer]], step: Step) -> None:
    assert after(*answers) == step


@pytest.mark.parametrize("state", ["comparing", "extracting", "done"])
def test_a_pod_that_makes_another_workspace_is_waited_for(state: str) -> None:
    assert isinstance(after((200, Answer(state, OTHER, 7))), Wait)


def test_what_is_missing_after_all_is_packed_as_well() -> None:
    upload = sending()
    upload.answered(202, Answer("extracting"), 0.0)
    upload.answered(200, Answer("waiting", workspace=WORK, missing=((2, 2),)), 0.0)
    assert upload.next_step(0.0) == Pack((2,))


def test_an_unknown_state_of_a_newer_pod_ends_it() -> None:
    assert isinstance(after((200, Answer("resting", "", 0))), Refused)


def test_a_damaged_upload_starts_again_and_not_for_ever() -> None:
    bad = (422, Answer(reason="DigestMismatch", message="digest is wrong", offset=0))
    twice = [WAITING, bad, WAITING, bad]
    assert isinstance(after(*twice), Wait)
    step = after(*twice, WAITING, bad)
    assert isinstance(step, Refused)
    assert "3 times" in step.message


def test_after_a_loss_it_waits_longer_each_time_and_asks_for_the_offset() -> None:
    upload = started()
    waits = []
    for _ in range(8):
        upload.lost("cut", 0.0)
        step = upload.next_step(0.0)
        assert isinstance(step, Wait)
        waits.append(step.seconds)
        assert upload.next_step(0.0) == Ask()
    assert waits[0] <= 0.5
    assert all(0.5 * min(15, 0.5 * 2**n) <= wait <= 15 for n, wait in enumerate(waits))


def test_the_server_may_ask_for_a_longer_wait() -> None:
    upload = started()
    upload.lost("busy", 0.0, retry_after=7.0)
    assert upload.next_step(0.0) == Wait(7.0)


def test_without_progress_it_gives_up_and_says_why() -> None:
    upload = started(backoff=Backoff(give_up=60))
    upload.lost("connection refused", 59.0)
    assert isinstance(upload.next_step(59.0), Wait)
    step = upload.next_step(61.0)
    assert isinstance(step, Refused)
    assert "connection refused" in step.message
    assert upload.next_step(100.0) == step


def test_progress_and_the_wait_for_a_pod_put_the_end_off() -> None:
    upload = sending(Backoff(give_up=60))
    upload.answered(200, Answer(offset=CHUNK), 55.0)
    assert upload.next_step(110.0) == Send(CHUNK, 2 * CHUNK)
    upload.waited(1000.0)
    assert upload.next_step(1110.0) == Send(CHUNK, 2 * CHUNK)


def test_a_pod_that_only_ever_gives_the_same_offset_is_given_up() -> None:
    upload, now = sending(Backoff(give_up=60)), 0.0
    for _ in range(1000):
        step = upload.next_step(now)
        if isinstance(step, Refused):
            return
        if isinstance(step, Wait):
            now += step.seconds
        else:
            status = 409 if isinstance(step, Send) else 200
            upload.answered(status, ours("waiting", offset=0), now)
    raise AssertionError("it goes on for ever")


@dataclass
class Pod:
    """The pod's side of the protocol, as the contract has it."""

    data: bytes
    held: bytearray = field(default_factory=bytearray)
    state: str = "waiting"
    announced: bool = False

    def ask(self) -> tuple[int, Answer]:
        if self.state == "extracting":
            self.state = "done"
            return 200, ours("extracting", sha256=SHA, offset=len(self.data))
        sha = SHA if self.held else ""
        workspace = WORK if self.announced else ""
        missing = MISSING if self.announced else ()
        return 200, Answer(
            self.state, sha, len(self.held), workspace=workspace, missing=missing, revision=1
        )

    def put(self, step: Send, damaged: bool) -> tuple[int, Answer]:
        if step.start != len(self.held):
            return 409, Answer(offset=len(self.held))
        part = self.data[step.start : step.stop]
        self.held += bytes(len(part)) if damaged else part
        self.state = "receiving"
        if len(self.held) < len(self.data):
            return 200, Answer(offset=len(self.held))
        if self.held != self.data:
            self.held.clear()
            self.state = "waiting"
            return 422, Answer(reason="DigestMismatch", message="wrong", offset=0)
        self.state = "extracting"
        return 202, Answer("extracting")


@examples(60)
@given(st.integers(1, 3 * CHUNK), st.floats(0, 0.6), st.randoms(use_true_random=False))
def test_whatever_is_lost_on_the_way_the_pod_ends_up_with_the_archive(
    size: int, loss: float, random: Random
) -> None:
    pod = Pod(b"x" * size)
    upload, now = Upload(WORK, 0.0, backoff=Backoff(give_up=1e9)), 0.0
    damages = 2
    for _ in range(5000):
        step = upload.next_step(now)
        match step:
            case Done():
                assert pod.held == pod.data
                return
            case Refused(reason):
                raise AssertionError(reason)
            case Wait(seconds):
                now += seconds
            case Pack():
                upload.packed(SHA, size, now)
            case Ask() | Send() | Announce():
                if random.random() < loss:  # the request is lost
                    upload.lost("cut", now)
                    continue
                if isinstance(step, Ask):
                    status, answer = pod.ask()
                elif isinstance(step, Announce):
                    pod.announced = True
                    status, answer = 202, Answer("comparing")
                else:
                    damaged = damages > 0 and random.random() < loss / 10
                    damages -= damaged
                    if random.random() < loss:  # half of the range arrives
                        half = Send(step.start, (step.start + step.stop) // 2)
                        if half.start < half.stop:
                            pod.put(half, damaged)
                        upload.lost("cut", now)
                        continue
                    status, answer = pod.put(step, damaged)
                if random.random() < loss:  # the answer is lost
                    upload.lost("cut", now)
                else:
                    upload.answered(status, answer, now)
    raise AssertionError("it never ends")
