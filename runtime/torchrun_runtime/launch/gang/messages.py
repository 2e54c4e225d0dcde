"""The messages between the launchers of a gang: one JSON object a line."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Union

from ..cause import Cause
from .checkpoints import CompleteCheckpoint, Saved, to_checkpoint, to_checkpoints, to_saves

NEVER = -1  # the round of a member that has not started yet
LONGEST_LINE = 1 << 17  # bytes: a character of a path takes up to 12
_LONGEST_NAME = 40  # characters of a network or its device

READY, RUNNING, SUCCEEDED, FAILED = "ready", "running", "succeeded", "failed"
LEAVING = "leaving"  # Kubernetes ends the pod
_STATES = (READY, RUNNING, SUCCEEDED, FAILED, LEAVING)
# What the processes of a node do since the import of torch.
ALONE, TOGETHER = "alone", "together"


class NcclTransport(NamedTuple):
    """The network that NCCL uses. name: as NCCL calls it. device: the interface of Socket, the
    provider of libfabric, else "".
    """

    name: str
    device: str = ""

    def describe(self) -> str:
        """For example "Socket over eth0"."""
        return f"{self.name} over {self.device}" if self.device else self.name


class MemberState(NamedTuple):
    """The state of one member.

    round: the newest that it started or will not start any more. cause: of a failed round. step:
    the newest one that rank 0 reported, if it ran on this node. training: ALONE, TOGETHER, or ""
    before a Python has imported torch. is_silent: the round had no output and no step, as far as
    this node sees it. transport: of this round, None while it is unknown. is_debugged: someone
    debugs a rank of this node. saved: by the ranks of the round. checked: digest of the checkpoints
    that this node has looked for before a start; missing: the places of those that it does not
    have.
    """

    state: str = READY
    round: int = NEVER
    cause: Cause | None = None
    step: int | None = None
    training: str = ""
    is_silent: bool = False
    transport: NcclTransport | None = None
    is_debugged: bool = False
    saved: tuple[Saved, ...] = ()
    checked: str = ""
    missing: tuple[int, ...] = ()


class RoundCode(NamedTuple):
    """The code that a round runs: a revision of the workspace, and where a serve pod has it."""

    revision: int = 0
    served: str = ""


class OpenGate(NamedTuple):
    """No rank of an older gang runs any more, but some nodes of this one are not ready yet.

    name: the word for this order in a message. It is a field, because a named tuple without fields
    is false, and equals every other empty tuple. checkpoints: see StopRound.
    """

    name: str = "open"
    checkpoints: tuple[CompleteCheckpoint, ...] = ()


class StartRound(NamedTuple):
    """Start the ranks of a round. restarts: how many of the gang's rounds failed before it.

    is_debugged: someone debugs a rank on any node now. checkpoint: the one to resume from, which
    every node has.
    """

    round: int
    code: RoundCode = RoundCode()
    restarts: int = 0
    is_debugged: bool = False
    checkpoint: CompleteCheckpoint | None = None


class StopRound(NamedTuple):
    """End the ranks of a round and of all rounds before it, and do not start them.

    failed: because a rank has failed, otherwise for newer code. edit: the failed round waits for
    the next edit, in development mode. checkpoints: complete ones, the newest first. The next round
    starts once every node has reported which of them it has.
    """

    round: int
    failed: bool = True
    edit: bool = False
    checkpoints: tuple[CompleteCheckpoint, ...] = ()


class EndGang(NamedTuple):
    """There is no further round: end with your own result. Ranks that run are not disturbed.

    cause: of an earlier round, on this node, if what it left made the last one fail.
    """

    name: str = "exit"
    node: int = -1
    cause: Cause | None = None


GangOrder = Union[OpenGate, StartRound, StopRound, EndGang]


class InvalidMessageError(ValueError):
    """A line that is not a message of this protocol."""


def encode_state(state: MemberState) -> bytes:
    """The line of a state."""
    body: dict[str, object] = {"state": state.state, "round": state.round}
    if state.cause is not None:
        body["cause"] = state.cause._asdict()
    if state.step is not None:
        body["step"] = state.step
    if state.training:
        body["training"] = state.training
    if state.is_silent:
        body["silent"] = True
    if state.transport is not None:
        body["transport"] = [*state.transport]
    if state.is_debugged:
        body["debugged"] = True
    if state.saved:
        body["saved"] = state.saved
    if state.checked:
        body["checked"], body["missing"] = state.checked, state.missing
    return encode(body)


def decode_state(line: bytes) -> MemberState:
    """The state in a line. Raises InvalidMessageError."""
    body = decode(line)
    try:
        if body["state"] not in _STATES:
            raise InvalidMessageError(f"not a state: {line[:80]!r}")
        cause = _decode_cause(body["cause"]) if body["state"] == FAILED else None
        step = body.get("step")
        step = None if step is None else int(step)
        training = str(body.get("training", ""))
        return MemberState(
            body["state"],
            int(body["round"]),
            cause,
            step,
            training,
            is_silent=bool(body.get("silent")),
            transport=_decode_transport(body["transport"]) if "transport" in body else None,
            is_debugged=bool(body.get("debugged")),
            saved=to_saves(body.get("saved", [])),
            checked=str(body.get("checked", "")),
            missing=tuple(int(place) for place in body.get("missing", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidMessageError(f"not a state: {line[:80]!r}") from error


def _decode_transport(body: list[Any]) -> NcclTransport:
    name, device = (str(text)[:_LONGEST_NAME] for text in body)
    return NcclTransport(name, device)


def _decode_cause(body: dict[str, Any]) -> Cause:
    cause = Cause(**body)
    if not all(isinstance(text, str) for text in (cause.reason, cause.message, cause.time)):
        raise TypeError("a text is expected")
    numbers = (cause.exit_code, cause.rank or 0, cause.signal or 0)
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("a number is expected")
    return cause


def encode_order(order: GangOrder) -> bytes:
    """The line of an order."""
    if isinstance(order, StartRound):
        body = {"order": "start", "round": order.round, "restarts": order.restarts}
        if order.is_debugged:
            body["debugged"] = True
        if order.checkpoint is not None:
            body["checkpoint"] = order.checkpoint._asdict()
        return encode({**body, **order.code._asdict()})
    if isinstance(order, StopRound):
        return encode({"order": "stop", **order._asdict(), **_encode_candidates(order)})
    if isinstance(order, OpenGate):
        return encode({"order": order.name, **_encode_candidates(order)})
    if isinstance(order, EndGang) and order.cause is not None:
        cause = order.cause._asdict()
        return encode({"order": order.name, "node": order.node, "cause": cause})
    return encode({"order": order.name})


def _encode_candidates(order: OpenGate | StopRound) -> dict[str, object]:
    return {"checkpoints": [checkpoint._asdict() for checkpoint in order.checkpoints]}


def decode_order(line: bytes) -> GangOrder:
    """The order in a line. Raises InvalidMessageError."""
    body = decode(line)
    try:
        name = body["order"]
        if name == "start":
            code = RoundCode(int(body["revision"]), str(body["served"]))
            restarts, debugged = int(body["restarts"]), bool(body.get("debugged"))
            chosen = to_checkpoint(body["checkpoint"]) if "checkpoint" in body else None
            return StartRound(int(body["round"]), code, restarts, debugged, chosen)
        if name == "stop":
            failed, edit = (bool(body.get(name)) for name in ("failed", "edit"))
            candidates = to_checkpoints(body.get("checkpoints", []))
            return StopRound(int(body["round"]), failed, edit, candidates)
        if name == "exit" and "cause" in body:
            return EndGang(node=int(body["node"]), cause=_decode_cause(body["cause"]))
        if name == "exit":
            return EndGang()
        if name == "open":
            return OpenGate(checkpoints=to_checkpoints(body.get("checkpoints", [])))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidMessageError(f"not an order: {line[:80]!r}") from error
    raise InvalidMessageError(f"not an order: {line[:80]!r}")


def encode(body: dict[str, object]) -> bytes:
    """The line of a message."""
    return json.dumps(body).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message of a complete line. Raises InvalidMessageError."""
    try:
        body = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise InvalidMessageError(f"not a message: {line[:80]!r}")
    return body
