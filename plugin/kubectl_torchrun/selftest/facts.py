"""What is known about a job of the self-test: what its ranks have told, and its status."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kubectl_torchrun.cluster.slices import JobStatusSlice, NetworkSlice

MARK = b"torchrun-selftest: "
# Of workspace/train.py.
SAVED_STEP = 20
HANGS_IN = "stand_still"
_WORD = re.compile(r"[A-Za-z0-9]{1,60}")
# Versions, models of hardware, networks. An image could print anything as its version of torch.
_PLAIN = re.compile(r"[\w.+() -]{1,64}", re.ASCII)
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")


class RankFact(msgspec.Struct, frozen=True):
    """A fact that a rank has told, as `print_fact` of workspace/train.py writes it.

    time: of the rank's machine. at: when this program read the line, in seconds of its clock. step:
    that of the checkpoint in `start`. free: bytes of GPU memory. seconds: of one all-reduce.
    """

    kind: str
    rank: int = 0
    attempt: int = 0
    round: int = 0
    time: float = 0.0
    at: float = 0.0
    step: int = 0
    free: int | None = None
    bytes: int = 0
    seconds: float = 0.0
    correct: bool = False
    files: bool = False

    @property
    def start(self) -> tuple[int, int]:
        """The attempt and the round."""
        return self.attempt, self.round


class RankVersions(msgspec.Struct, frozen=True):
    """Hardware and versions as rank 0 sees them. world: ranks. gpu: the model, None without."""

    world: int = 0
    backend: str = ""
    python: str = ""
    torch: str = ""
    gpu: str | None = None
    gpu_bytes: int | None = None
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None


class JobRecord(NamedTuple):
    """One job. Times in seconds of this program's clock.

    network, slow: the last network that the status had, and the reason of SlowNetwork if it was
    True. acts: when the plugin has deleted, suspended and resumed. still: the ranks whose stacks
    show that they hang, of `stacks` ranks. why: why the plugin has stopped waiting.
    """

    events: Sequence[RankFact] = ()
    versions: RankVersions = RankVersions()
    status: JobStatusSlice = JobStatusSlice()
    network: tuple[NetworkSlice, ...] = ()
    slow: str = ""
    acts: Mapping[str, float] = MappingProxyType({})
    still: frozenset[int] = frozenset()
    stacks: int = 0
    why: str = ""

    @property
    def has_started(self) -> bool:
        """Whether a rank has run."""
        return bool(self.events)

    @property
    def odd(self) -> int:
        """The rank that breaks."""
        return max(self.versions.world - 1, 0)

    def of(self, kind: str) -> list[RankFact]:
        """The facts of a kind, in the order of their arrival."""
        return [event for event in self.events if event.kind == kind]

    def second_start(self) -> list[RankFact]:
        """The facts of the first start of the ranks after the first one; empty without any."""
        later = [event for event in self.events if event.start > (0, 0)]
        first = min((event.start for event in later), default=(0, 0))
        return [event for event in later if event.start == first]


def parse_event(line: bytes, at: float) -> tuple[RankFact | None, RankVersions | None]:
    """The fact in a line of a log, of which torchrun may have marked the rank."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None, None
    try:
        event = msgspec.structs.replace(msgspec.json.decode(text, type=RankFact), at=at)
        is_versions = event.kind == "versions"
        return event, msgspec.json.decode(text, type=RankVersions) if is_versions else None
    except msgspec.DecodeError:
        return None, None


def known_reason(reason: str) -> str:
    """A reason of the API, which is one word. Other text may have names of the cluster."""
    return reason if _WORD.fullmatch(reason) else "an unknown reason"


def plain(text: str | None) -> str | None:
    """A version or a model; None for text that is neither, and could be a name or an address."""
    if text and _PLAIN.fullmatch(text) and not _ADDRESS.search(text):
        return text
    return None
