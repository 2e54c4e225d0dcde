"""The upload protocol of the sync pod as a state machine: no socket, no clock.

Ask `next_step` what to do, do it, and say by `answered` or `lost` how it went. The pod keeps what
it has received, also over its own replacement, so after any doubt the machine asks for the offset
and goes on from there.
"""

from typing import NamedTuple, TypeAlias

from msgspec import Struct

from kubectl_torchrun.cluster.backoff import PATIENT, Backoff

CHUNK = 8 << 20
_POLL = 0.05
_DIGEST_TRIES = 3


class Ask(NamedTuple):
    """GET the pod's state."""


class Announce(NamedTuple):
    """PUT the manifest, as a difference to the one with this digest, or whole."""

    base: str


class Pack(NamedTuple):
    """Make an archive of these entries of the manifest, and tell by `packed`."""

    wanted: tuple[int, ...]


class Send(NamedTuple):
    """PUT the archive's bytes from `start` to before `stop`."""

    start: int
    stop: int


class Wait(NamedTuple):
    """Do nothing for so many seconds."""

    seconds: float


class Done(NamedTuple):
    """The pod has made the workspace, as this revision."""

    revision: int


class Refused(NamedTuple):
    """It will not be taken, or it was tried long enough."""

    reason: str
    message: str


Step: TypeAlias = Ask | Announce | Pack | Send | Wait | Done | Refused
Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Answer(Struct, frozen=True):
    """The body of an answer of the pod; what an answer does not carry is at its default."""

    state: str = ""
    sha256: str = ""
    offset: int | None = None
    reason: str = ""
    message: str = ""
    workspace: str = ""
    missing: Ranges = ()
    base: str = ""
    revision: int = 0


class Upload:
    """One workspace on its way. `now` is a monotonic clock in seconds.

    workspace: digest of its manifest; base: digest of another that the pod may have.
    `offset`: bytes of the archive that the pod is known to hold; `extracting`: it has them all.
    """

    def __init__(
        self, workspace: str, now: float, base: str = "", backoff: Backoff = PATIENT
    ) -> None:
        self.size = 0
        self.sha256 = ""
        self.offset = 0
        self.extracting = False
        self.trouble = ""
        self._workspace = workspace
        self._base = base
        self._packed: Ranges = ()
        self._backoff = backoff
        self._failures = 0
        self._progress_at = now
        self._bad_digests = 0
        self._sent = False  # then what the pod says of a failure is about this archive
        self._steps: list[Step] = [Ask()]

    def next_step(self, now: float) -> Step:
        """What to do now. Done and Refused are final and come again when asked again."""
        step = self._steps[0]
        if isinstance(step, Done | Refused):
            return step
        if now - self._progress_at > self._backoff.give_up:
            why = self.trouble or "the pod does not finish"
            self._then(Refused("GaveUp", f"no progress for {self._backoff.give_up:.0f} s: {why}"))
            return self._steps[0]
        if isinstance(step, Wait):
            self._steps.pop(0)
        return step

    def waited(self, seconds: float) -> None:
        """There was no pod to speak to for so long: that does not count against the upload."""
        self._progress_at += seconds

    def packed(self, sha256: str, size: int, now: float) -> None:
        """The archive that was asked for is there: digest, bytes. Packing may take its time."""
        self.sha256 = sha256
        self.size = size
        self._progressed(now)
        self._then(Ask())

    def lost(self, why: str, now: float, retry_after: float | None = None) -> None:
        """No answer came, or one that says to try again: back off, then ask for the offset."""
        del now
        step = self._steps[0]
        self._sent = self._sent or (isinstance(step, Send) and step.stop == self.size)
        self.trouble = why
        self._failures += 1
        delay = self._backoff.delay(self._failures)
        self._then(Wait(max(delay, min(retry_after or 0.0, self._backoff.longest))), Ask())

    def answered(self, status: int, answer: Answer, now: float) -> None:
        """The pod itself answered the last Ask or Send."""
        step = self._steps[0]
        if status >= 500 and status != 507:
            self.lost(answer.message or f"the pod answered {status}", now)
        elif isinstance(step, Ask) and status == 200:
            self._described(answer, now)
        elif isinstance(step, Announce) and status == 202:
            self._then(Ask())
        elif isinstance(step, Announce) and status == 409:
            if not step.base:
                self.lost(answer.message, now)
            self._base = ""
            self._then(Announce(""))
        elif isinstance(step, Send) and status == 200 and answer.offset is not None:
            self._sent = True
            self._advance(answer.offset, now)
        elif isinstance(step, Send) and status == 202:
            self._sent = True
            self._received(now)
            self._then(Ask())
        elif isinstance(step, Send) and status == 409 and answer.offset is not None:
            self._moved(step, answer.offset, now)
        elif isinstance(step, Send) and status == 409:
            self.lost(answer.message, now)
        elif status == 422 and answer.reason == "DigestMismatch":
            self._mismatch(answer, now)
        else:
            self._then(
                Refused(answer.reason or f"HTTP{status}", answer.message or "no reason given")
            )

    def _described(self, answer: Answer, now: float) -> None:
        ours = answer.workspace == self._workspace
        match answer.state:
            case "failed" if ours and self._sent:
                self._then(Refused(answer.reason, answer.message))
            case "waiting" | "receiving" | "failed" if not ours or answer.state == "failed":
                self._sent = True
                self._then(Announce(self._base if self._base == answer.base else ""))
            case "waiting" | "receiving" if answer.missing != self._packed or not self.sha256:
                self._packed = answer.missing
                self._progressed(now)
                self._then(Pack(_numbers(answer.missing)))
            case "waiting" | "receiving":
                held = answer.offset if answer.sha256 == self.sha256 else 0
                self._advance(held or 0, now)
            case "comparing" | "extracting" if ours:
                if answer.state == "extracting":
                    self._received(now)
                self._then(Wait(_POLL), Ask())
            case "done" if ours:
                self._received(now)
                self._then(Done(answer.revision))
            case "comparing" | "extracting" | "done":
                self.lost("the pod makes another workspace", now)
            case state:
                message = f"unknown state {state!r}; plugin and controller differ in version"
                self._then(Refused("UnknownState", message))

    def _advance(self, offset: int, now: float) -> None:
        if offset > self.offset:
            self._progressed(now)
        self.offset = offset
        self.extracting = False
        if offset >= self.size:
            self._then(Wait(_POLL), Ask())
        else:
            self._then(Send(offset, min(offset + CHUNK, self.size)))

    def _moved(self, sent: Send, offset: int, now: float) -> None:
        if offset == sent.start:
            self.lost("the pod refuses the offset that it asks for", now)
        else:
            self._advance(offset, now)

    def _mismatch(self, answer: Answer, now: float) -> None:
        self._bad_digests += 1
        if self._bad_digests >= _DIGEST_TRIES:
            self._then(Refused(answer.reason, f"{answer.message} ({_DIGEST_TRIES} times in a row)"))
        else:
            self.offset = 0
            self.lost(answer.message, now)

    def _received(self, now: float) -> None:
        if not self.extracting:
            self._progressed(now)
        self.offset = self.size
        self.extracting = True

    def _progressed(self, now: float) -> None:
        self._progress_at = now
        self._failures = 0
        self.trouble = ""

    def _then(self, *steps: Step) -> None:
        self._steps = list(steps)


def _numbers(ranges: Ranges) -> tuple[int, ...]:
    return tuple(number for first, last in ranges for number in range(first, last + 1))
