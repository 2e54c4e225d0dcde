"""The upload protocol of the sync pod as a state machine without I/O or clock.

Call `next_step`, run the step, and report the result by `on_response` or `on_failure`. The pod
keeps received bytes even if it is replaced. After a failure the machine gets the offset and
continues there.
"""

from typing import NamedTuple, TypeAlias

from msgspec import Struct

from kubectl_torchrun.cluster.backoff import PATIENT, Retries
from kubectl_torchrun.upload.tree import MOST_COPIES

CHUNK = 8 << 20
_POLL = 0.05
_DIGEST_TRIES = 3


class GetState(NamedTuple):
    """GET the pod's state."""


class PutManifest(NamedTuple):
    """PUT the manifest, as a difference to the one with digest `base`, or whole ("")."""

    base: str


class BuildArchive(NamedTuple):
    """Build an archive of these entries of the manifest, and report it by `on_archive`."""

    entries: tuple[int, ...]


class PutRange(NamedTuple):
    """PUT the archive's bytes from `start` to before `stop`."""

    start: int
    stop: int


class Sleep(NamedTuple):
    """Wait."""

    seconds: float


class Stored(NamedTuple):
    """The pod has the workspace, as this revision."""

    revision: int


class Rejected(NamedTuple):
    """The pod rejected the upload, or there was no progress for too long."""

    reason: str
    message: str


Step: TypeAlias = GetState | PutManifest | BuildArchive | PutRange | Sleep | Stored | Rejected
Ranges: TypeAlias = tuple[tuple[int, int], ...]


class PodReply(Struct, frozen=True):
    """The body of a response of the pod; missing fields have their defaults.

    progress: changes while a pod that compares or extracts works; 0 from older pods.
    """

    state: str = ""
    sha256: str = ""
    offset: int | None = None
    reason: str = ""
    message: str = ""
    workspace: str = ""
    missing: Ranges = ()
    base: str = ""
    revision: int = 0
    progress: int = 0


class Upload:
    """The upload of one workspace. `now` is a monotonic clock in seconds.

    workspace: digest of its manifest; base: digest of a manifest that the pod may have.
    `offset`: bytes of the archive that the pod has; `extracting`: it has all of them.
    """

    def __init__(
        self, workspace: str, now: float, base: str = "", backoff: Retries = PATIENT
    ) -> None:
        self.size = 0
        self.sha256 = ""
        self.offset = 0
        self.extracting = False
        self.trouble = ""
        self._workspace = workspace
        self._base = base
        self._packed_ranges: Ranges = ()
        self._backoff = backoff
        self._failures = 0
        self._progress_at = now
        self._pod_progress = 0
        self._bad_digests = 0
        self._is_sent = False  # if True, a failure of the pod is about this archive
        self._steps: list[Step] = [GetState()]

    def next_step(self, now: float) -> Step:
        """The next step. Done and Refused are final."""
        step = self._steps[0]
        if isinstance(step, Stored | Rejected):
            return step
        if now - self._progress_at > self._backoff.give_up:
            why = self.trouble or "the pod did not finish"
            self._then(Rejected("GaveUp", f"no progress for {self._backoff.give_up:.0f} s: {why}"))
            return self._steps[0]
        if isinstance(step, Sleep):
            self._steps.pop(0)
        return step

    def add_idle_time(self, seconds: float) -> None:
        """Exclude the time without a pod from the time without progress."""
        self._progress_at += seconds

    def on_archive(self, sha256: str, size: int, now: float) -> None:
        """The archive is built: digest, bytes. The time that it took counts as progress."""
        self.sha256 = sha256
        self.size = size
        self._progressed(now)
        self._then(GetState())

    def on_failure(self, why: str, now: float, retry_after: float | None = None) -> None:
        """No response, or a retriable one: back off, then get the offset."""
        del now
        step = self._steps[0]
        self._is_sent = self._is_sent or (isinstance(step, PutRange) and step.stop == self.size)
        self.trouble = why
        self._failures += 1
        delay = self._backoff.delay(self._failures)
        self._then(Sleep(max(delay, min(retry_after or 0.0, self._backoff.longest))), GetState())

    def on_response(self, status: int, response: PodReply, now: float) -> None:
        """The pod itself responded to the last GetState, PutManifest or PutRange."""
        if status >= 500 and status != 507:
            self.on_failure(response.message or f"the pod returned HTTP {status}", now)
            return
        match self._steps[0]:
            case GetState() if status == 200:
                self._on_state(response, now)
            case PutManifest(base) if status in (202, 409):
                self._on_manifest_response(base, status, response, now)
            case PutRange(start) if status in (202, 409):
                self._on_range_response(start, status, response, now)
            case PutRange() if status == 200 and response.offset is not None:
                self._is_sent = True
                self._advance(response.offset, now)
            case _ if status == 422 and response.reason == "DigestMismatch":
                self._on_digest_mismatch(response, now)
            case _:
                reason = response.reason or f"HTTP{status}"
                self._then(Rejected(reason, response.message or "no reason given"))

    def _on_manifest_response(self, base: str, status: int, response: PodReply, now: float) -> None:
        """202: the pod has the manifest. 409: it does not have the base of the difference."""
        if status == 202:
            self._then(GetState())
            return
        if not base:
            self.on_failure(response.message, now)
            return
        self._base = ""
        self._then(PutManifest(""))

    def _on_range_response(self, start: int, status: int, response: PodReply, now: float) -> None:
        """202: the pod has the whole archive. 409: it expects another offset."""
        if status == 202:
            self._is_sent = True
            self._received(now)
            self._then(GetState())
        elif response.offset is None:
            self.on_failure(response.message, now)
        elif response.offset == start:
            self.on_failure("the pod rejected the offset that it requested", now)
        else:
            self._advance(response.offset, now)

    def _on_state(self, response: PodReply, now: float) -> None:
        """Handle the state of the pod, for this workspace or another one."""
        match response.state:
            case "waiting" | "receiving" | "failed" | "comparing" | "extracting" | "done":
                if response.workspace == self._workspace:
                    self._on_own_state(response, now)
                elif response.state in ("waiting", "receiving", "failed"):
                    self._put_manifest(response)
                else:
                    self.on_failure("the pod is receiving another workspace", now)
            case state:
                message = f"unknown state {state!r}; plugin and controller versions differ"
                self._then(Rejected("UnknownState", message))

    def _on_own_state(self, response: PodReply, now: float) -> None:
        match response.state:
            case "failed" if self._is_sent:
                self._then(Rejected(response.reason, response.message))
            case "failed":
                self._put_manifest(response)
            case "waiting" | "receiving" if not _are_possible(response.missing):
                message = "the pod requests files that no workspace has"
                self._then(Rejected("InvalidResponse", message))
            case "waiting" | "receiving" if (
                response.missing != self._packed_ranges or not self.sha256
            ):
                self._packed_ranges = response.missing
                self._progressed(now)
                self._then(BuildArchive(_numbers(response.missing)))
            case "waiting" | "receiving":
                offset = response.offset if response.sha256 == self.sha256 else 0
                self._advance(offset or 0, now)
            case "done":
                self._received(now)
                self._then(Stored(response.revision))
            case _:  # comparing or extracting
                if response.state == "extracting":
                    self._received(now)
                if response.progress != self._pod_progress:
                    self._pod_progress = response.progress
                    self._progressed(now)
                self._then(Sleep(_POLL), GetState())

    def _put_manifest(self, response: PodReply) -> None:
        """Send the manifest, as a difference if the pod has the base."""
        self._is_sent = True
        self._then(PutManifest(self._base if self._base == response.base else ""))

    def _advance(self, offset: int, now: float) -> None:
        if offset > self.offset:
            self._progressed(now)
        self.offset = offset
        self.extracting = False
        if offset >= self.size:
            self._then(Sleep(_POLL), GetState())
        else:
            self._then(PutRange(offset, min(offset + CHUNK, self.size)))

    def _on_digest_mismatch(self, response: PodReply, now: float) -> None:
        self._bad_digests += 1
        if self._bad_digests >= _DIGEST_TRIES:
            message = f"{response.message} ({_DIGEST_TRIES} times in a row)"
            self._then(Rejected(response.reason, message))
        else:
            self.offset = 0
            self.on_failure(response.message, now)

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


def _are_possible(ranges: Ranges) -> bool:
    """Whether they are ranges of entries of a workspace within its limits."""
    total = sum(last - first + 1 for first, last in ranges)
    return total <= MOST_COPIES and all(0 <= first <= last for first, last in ranges)


def _numbers(ranges: Ranges) -> tuple[int, ...]:
    return tuple(number for first, last in ranges for number in range(first, last + 1))
