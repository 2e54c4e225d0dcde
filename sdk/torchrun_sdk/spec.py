"""The protocol of client and pod: files of a call in the workspace, and messages between them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from torchrun_sdk.serialization import SCRIPT_NAME as SCRIPT_NAME
from torchrun_sdk.serialization import Packed

# In the workspace: the package itself, the call, and the files of its ranks.
FOLDER = ".torchrun-sdk"
CALL_FILE = "call.json"
RESULTS = "results"
# Of warm pods: the folder of later calls.
CALLS = "calls"
ENTRY = "run.py"
# Folder of the job's state directory, which outlives the pods: results of ranks, by call.
STATE_FOLDER = "sdk"

# The name of the script for a function that was typed at a prompt.
CELL = "notebook.py"
# Exit code of a rank whose function raised: a restart would not change the result.
RAISED = 86
# Set in every rank, so that the import of a module with a remote call creates no job.
IN_CALL = "TORCHRUN_SDK_CALL"
# For clusters without GPUs: workers have the resources of the queue, and gloo replaces nccl.
CPU_ONLY = "TORCHRUN_SDK_CPU_ONLY"


class FrameError(ValueError):
    """The line is not a message of this protocol. The text has the reason."""


class Reference(NamedTuple):
    """A reference to a function: an importable module or the path of a script, and its name.

    script: for `__main__`, relative to the workspace. path: entries of sys.path, also relative.
    """

    qualname: str
    module: str = ""
    script: str = ""
    path: list[str] = []  # noqa: RUF012 - never changed
    # The source of a script without a file, typed at a prompt or in a cell.
    cell: str = ""
    # The package of a script that `python -m` runs.
    package: str = ""


class Call(NamedTuple):
    """One call, as every rank reads it. Times in seconds.

    id: later ones are greater. linger: how long results wait for a client. idle: how long the pods
    wait for another call; with 0 a rank ends after one call. quorum: time limit for Ray's workers
    to connect. number: of the call in its gang, 0 for the call that the job was created for.
    cluster: host name of the head of the RayCluster of the call. returns: ALL ranks or the HEAD.
    secret: authenticates Ray's pods of the job to each other; see `worker.control_port`.
    """

    id: str
    function: Reference
    arguments: Packed
    linger: float = 600.0
    idle: float = 0.0
    cpu_only: bool = False
    # "ray": only index 0 calls the function, with this number of workers, each with this number of
    # GPUs that Ray only counts (None: Ray detects them).
    framework: str = ""
    workers: int = 1
    worker_gpus: int | None = None
    quorum: float = 600.0
    number: int = 0
    cluster: str = ""
    returns: str = "all"
    secret: str = ""


class Started(NamedTuple):
    """A rank is about to call the function. monotonic: clock of its node, as in Raised."""

    rank: int
    world_size: int
    node: str
    local_world_size: int
    time: float
    monotonic: float = 0.0


class Result(NamedTuple):
    """The result of a rank. head: the caller wants only that of rank 0; other ranks have None."""

    rank: int
    node: str
    value: Packed
    head: bool = False


class Raised(NamedTuple):
    """The exception of a rank's function, or the reason why it could not be called.

    time: wall clock, only for display, because the clocks of nodes differ. The other times are in
    seconds of one node and order the ends of ranks. elapsed: since the start of the rank.
    monotonic: time of the exception, by the monotonic clock of the node. age: time since then when
    the node sent the frame. base: the nearest built-in class of the exception, such as ValueError.
    """

    rank: int
    node: str
    time: float
    type: str
    text: str
    traceback: str
    incompatible: bool = False
    elapsed: float = 0.0
    monotonic: float = 0.0
    age: float = 0.0
    base: str = ""


class Exited(NamedTuple):
    """A rank's process ended without a message. code: 128 + number for a signal.

    out_of_memory: the kernel killed a process of the pod meanwhile. Times are as in Raised.
    """

    rank: int
    node: str
    time: float
    code: int
    out_of_memory: bool = False
    elapsed: float = 0.0
    monotonic: float = 0.0
    age: float = 0.0


class Removed(NamedTuple):
    """Another client has read the rank's last frame, and a later call has removed it."""

    rank: int


class Lines(NamedTuple):
    """Output of a rank of a warm pod. first: number of the first of these lines, from 0."""

    rank: int
    first: int
    lines: list[str]


class Here(NamedTuple):
    """A pod's first message to a client. has_call: it has the client's call, or had it.

    state: towards another call: FREE, BUSY or CLOSED. last: the greatest number of its calls. call:
    the id of the client's call, "" from an older package.
    """

    has_call: bool
    state: str
    last: int
    call: str = ""


class Wants(NamedTuple):
    """The lines of the client's manifest, from 0, whose contents the pod lacks."""

    lines: list[int]


class Ready(NamedTuple):
    """The pod has all files of the call, and waits for the client's message to start."""


class Refused(NamedTuple):
    """The pod cannot run the call, for this reason."""

    why: str


# The last line of a rank's output in warm pods: a client has all output then.
END_OF_CALL = "torchrun-sdk: end of call {call}"
FREE, BUSY, CLOSED = "free", "busy", "closed"
ALL, HEAD = "all", "head"
Frame = Union[Started, Result, Raised, Exited, Removed]
Message = Union[Frame, Lines, Here, Wants, Ready, Refused]
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Started, Result, Raised, Exited, Removed, Lines, Here, Wants, Ready, Refused)
}


def write_call(folder: Path, call: Call) -> None:
    """Write the call into the folder that becomes FOLDER of the workspace."""
    (folder / CALL_FILE).write_text(dump_call(call), encoding="utf-8")


def read_call(folder: Path) -> Call:
    """Read the call of the workspace. Raises OSError, ValueError."""
    return load_call((folder / CALL_FILE).read_text(encoding="utf-8"))


def dump_call(call: Call) -> str:
    """The call as one line of text."""
    return json.dumps(
        {
            **call._asdict(),
            "function": call.function._asdict(),
            "arguments": call.arguments._asdict(),
        }
    )


def load_call(text: str) -> Call:
    """The call from its text. Raises ValueError."""
    body = json.loads(text)
    if not isinstance(body, dict):
        raise FrameError(f"a call is {type(body).__name__}")
    function = _known_fields(Reference, body.get("function"))
    arguments = _known_fields(Packed, body.get("arguments"))
    call: Call = _build(
        Call,
        {
            **_known_fields(Call, body),
            "function": _build(Reference, function),
            "arguments": _build(Packed, arguments),
        },
    )
    return call


def encode(message: Message) -> str:
    """A message as one line, for the files of a rank and for the client."""
    body: dict[str, Any] = {"kind": type(message).__name__, **message._asdict()}
    if isinstance(message, Result):
        body["value"] = message.value._asdict()
    return json.dumps(body)


def decode(line: str) -> Message | None:
    """Decode a line; None for a kind of message that this version does not know.

    Unknown fields are ignored, so that pods may have a newer package than the client. Raises
    FrameError if a field is missing or has another type, or if the line is incomplete.
    """
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"it is not JSON ({error})") from error
    kind = _KINDS.get(str(body.get("kind"))) if isinstance(body, dict) else None
    if kind is None:
        return None
    fields = _known_fields(kind, body)
    if kind is Result:
        fields["value"] = _build(Packed, _known_fields(Packed, fields.get("value")))
    message: Message = _build(kind, fields)
    for name, hint in _hints(kind).items():
        value = getattr(message, name)
        if not _fits(value, hint):
            raise FrameError(f"{name} of {kind.__name__} is {type(value).__name__}")
    return message


def _known_fields(kind: Any, body: Any) -> dict[str, Any]:
    """The fields of a body that this kind has. Raises FrameError."""
    if not isinstance(body, dict):
        raise FrameError(f"{kind.__name__} is {type(body).__name__}")
    return {name: body[name] for name in kind._fields if name in body}


def _build(kind: Any, fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except TypeError as error:
        raise FrameError(str(error)) from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(each, get_args(hint)[0]) for each in value)
    if hint is Packed:
        return isinstance(value, Packed) and all(isinstance(part, str) for part in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint
