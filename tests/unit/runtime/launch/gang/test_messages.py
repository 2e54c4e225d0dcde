"""Messages between launchers: what is no message of the protocol is refused as a whole."""

from collections.abc import Callable

import pytest

from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.gang.messages import (
    ALONE,
    FAILED,
    RUNNING,
    EndGang,
    GangOrder,
    InvalidMessageError,
    MemberState,
    NcclTransport,
    OpenGate,
    RoundCode,
    StartRound,
    StopRound,
    decode,
    decode_order,
    decode_state,
    encode,
    encode_order,
    encode_state,
)

CAUSE = Cause(137, 3, 9, "Signaled", "Rank 3 was killed by SIGKILL.", "2026-01-01T00:00:00Z")


@pytest.mark.parametrize(
    "state",
    [
        MemberState(),
        MemberState(FAILED, 4, CAUSE, 120),
        MemberState(training=ALONE, is_silent=True),
        MemberState(RUNNING, 0, transport=NcclTransport("AWS Libfabric", "efa")),
        MemberState(RUNNING, 0, is_debugged=True),
        MemberState(FAILED, 4, CAUSE._replace(rank=None, signal=None)),
    ],
)
def test_a_state_arrives_as_it_was_sent(state: MemberState) -> None:
    assert decode_state(encode_state(state)) == state


@pytest.mark.parametrize(
    "order",
    [
        OpenGate(),
        StartRound(3, RoundCode(7, "http://a b"), 2),
        StartRound(3, is_debugged=True),
        StopRound(3),
        StopRound(3, failed=False, edit=True),
        EndGang(),
        EndGang(node=1, cause=CAUSE),
    ],
)
def test_an_order_arrives_as_it_was_sent(order: GangOrder) -> None:
    assert decode_order(encode_order(order)) == order


def test_orders_without_a_round_differ() -> None:
    assert OpenGate() != EndGang()


@pytest.mark.parametrize(
    "wrong",
    [{"message": 1}, {"time": None}, {"reason": []}, {"rank": "x"}, {"exit_code": "1"}, {"x": 1}],
)
def test_a_cause_of_other_types_is_refused(wrong: dict[str, object]) -> None:
    body = {"state": FAILED, "round": 0, "cause": {**CAUSE._asdict(), **wrong}}
    with pytest.raises(InvalidMessageError):
        decode_state(encode(body))


@pytest.mark.parametrize(
    ("read", "line", "text"),
    [
        (decode, b"x" * 200, "not a message"),
        (decode_state, encode({"round": 0, "cause": "x" * 200}), "not a state"),
        (decode_state, encode({"state": "x" * 200, "round": 0}), "not a state"),
        (decode_order, encode({"round": "x" * 200}), "not an order"),
        (decode_order, encode({"order": "x" * 200}), "not an order"),
    ],
)
def test_the_start_of_a_refused_line_is_shown(
    read: Callable[[bytes], object], line: bytes, text: str
) -> None:
    with pytest.raises(InvalidMessageError) as refusal:
        read(line)
    assert str(refusal.value) == f"{text}: {line[:80]!r}"


@pytest.mark.parametrize("line", [b"", b"{}", b"[]\n", b"\xff\n", b"[" * 60_000 + b"\n"])
def test_a_line_that_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        decode(line)
