"""What client and pod agree on: where a call stands in the workspace, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Union

from torchrun_sdk.values import Packed

# In the workspace: the package itself, the call, and what its ranks leave.
FOLDER = ".torchrun-sdk"
CALL_FILE = "call.json"
RESULTS = "results"
# What came later than the job: calls, and the state of the pod towards its clients.
CALLS = "calls"
ENTRY = "run.py"
# Below the job's state directory, which outlives the pods: what ranks left, by call.
KEPT = "sdk"

# As what a script is imported: its block under `if __name__ == "__main__"` is the client's.
SCRIPT_NAME = "__torchrun_script__"
# The script's name where the function was typed at a prompt.
CELL = "notebook.py"
# Of a rank whose function raised: no restart brings another result.
RAISED = 86
# Set in every rank, so that a module that makes a remote call when imported makes none there.
IN_CALL = "TORCHRUN_SDK_CALL"
# Where there are no GPUs: a worker is what the queue gives, and nccl becomes gloo.
CPU_ONLY = "TORCHRUN_SDK_CPU_ONLY"


class Reference(NamedTuple):
    """How a function is found again: an importable module, or a script's path, and its name.

    script: relative to the workspace, for what was `__main__`. path: entries of sys.path, likewise.
    """

    qualname: str
    module: str = ""
    script: str = ""
    path: list[str] = []  # noqa: RUF012 - never changed
    # The source of a script that is in no file: what was typed at a prompt or in a cell.
    cell: str = ""


class Call(NamedTuple):
    """One call, as every rank reads it. Times in seconds.

    id: later ones are greater. linger: how long results wait for a client. idle: how long the pods
    wait for another call; with 0 a rank is one call. quorum: how long the workers of Ray may take
    to come. number: of the call in its gang, 0 for the one that came with the job.
    cluster: host name of the head of a RayCluster that is there for the call.
    """

    id: str
    function: Reference
    arguments: Packed
    linger: float = 600.0
    idle: float = 0.0
    cpu_only: bool = False
    # "ray": index 0 alone calls the function, with so many workers, each with so many GPUs that
    # are only counted (None: Ray finds them).
    framework: str = ""
    workers: int = 1
    worker_gpus: int | None = None
    quorum: float = 600.0
    number: int = 0
    cluster: str = ""


class Started(NamedTuple):
    """A rank is about to call the function."""

    rank: int
    world_size: int
    node: str
    local_world_size: int
    time: float


class Result(NamedTuple):
    """What a rank's function returned."""

    rank: int
    node: str
    value: Packed


class Raised(NamedTuple):
    """What a rank's function raised, or why it could not be called."""

    rank: int
    node: str
    time: float
    type: str
    text: str
    traceback: str
    incompatible: bool = False


class Exited(NamedTuple):
    """A rank's process ended without a word. code: 128 + number for a signal.

    out_of_memory: the kernel killed a process of the pod meanwhile.
    """

    rank: int
    node: str
    time: float
    code: int
    out_of_memory: bool = False


class Lines(NamedTuple):
    """What a rank that stays has printed; first: the number of the first of these lines, from 0."""

    rank: int
    first: int
    lines: list[str]


class Here(NamedTuple):
    """A pod's first word to a client. known: it has the client's call, or had it.

    state: towards another call: FREE, BUSY or CLOSED. last: the greatest number of its calls.
    """

    known: bool
    state: str
    last: int


class Wants(NamedTuple):
    """The lines of the client's manifest, from 0, whose contents the pod has not."""

    lines: list[int]


class Ready(NamedTuple):
    """The pod has all that the call needs, and waits for the client's word to begin."""


class Refused(NamedTuple):
    """The pod cannot take the call, and why."""

    why: str


# The last line of a rank's output in pods that stay: a client has seen all of it then.
END_OF_CALL = "torchrun-sdk: end of call {call}"
FREE, BUSY, CLOSED = "free", "busy", "closed"
Frame = Union[Started, Result, Raised, Exited]
Word = Union[Frame, Lines, Here, Wants, Ready, Refused]
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Started, Result, Raised, Exited, Lines, Here, Wants, Ready, Refused)
}


def write_call(folder: Path, call: Call) -> None:
    """Write it into the folder that becomes FOLDER of the workspace."""
    (folder / CALL_FILE).write_text(dump_call(call), encoding="utf-8")


def read_call(folder: Path) -> Call:
    """The call of the workspace. Raises OSError, ValueError."""
    return load_call((folder / CALL_FILE).read_text(encoding="utf-8"))


def dump_call(call: Call) -> str:
    """As one line of text."""
    return json.dumps(
        {
            **call._asdict(),
            "function": call.function._asdict(),
            "arguments": call.arguments._asdict(),
        }
    )


def load_call(text: str) -> Call:
    """The call of a text. Raises ValueError."""
    body: dict[str, Any] = json.loads(text)
    body["function"] = Reference(**body["function"])
    body["arguments"] = Packed(**body["arguments"])
    return Call(**body)


def encode(word: Word) -> str:
    """A line of what a rank leaves, and of what is sent to the client."""
    body: dict[str, Any] = {"kind": type(word).__name__, **word._asdict()}
    if isinstance(word, Result):
        body["value"] = word.value._asdict()
    return json.dumps(body)


def decode(line: str) -> Word | None:
    """What a line says; None for anything else. Raises ValueError where it is cut."""
    body = json.loads(line)
    kind = _KINDS.get(body.pop("kind", "")) if isinstance(body, dict) else None
    if kind is None:
        return None
    if kind is Result:
        body["value"] = Packed(**body["value"])
    word: Word = kind(**body)
    return word
