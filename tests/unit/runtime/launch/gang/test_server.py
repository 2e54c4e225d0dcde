"""Whom the leader's server admits, and when it ends."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from ports import free_port
from torchrun_runtime.launch.gang import server
from torchrun_runtime.launch.gang.greeting import is_proof, proof
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.messages import (
    EndGang,
    GangOrder,
    MemberState,
    OpenGate,
    StartRound,
    decode,
    encode,
    encode_order,
    encode_state,
)
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from torchrun_runtime.launch.gang.server import GangServer

KEY, NONCE = "uid 1", "a nonce"


class Member:
    """A member by hand, which can also say what no launcher says."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._lines = self._socket.makefile("rb")

    def greet(self, index: object, proved: int, key: str = KEY) -> bytes:
        """The answer of the leader; empty if it closes the connection."""
        nonces = (str(decode(self._lines.readline())["nonce"]), NONCE)
        claim = proof(key, "member", nonces, proved)
        hello = {"index": index, "nonce": NONCE, "proof": claim, "instance": f"member {index}"}
        self._socket.sendall(encode(hello))
        answer = self._lines.readline()
        if answer:
            assert is_proof(decode(answer)["proof"], proof(KEY, "leader", nonces, proved))
        return answer

    def report(self, state: MemberState) -> None:
        self._socket.sendall(encode_state(state))

    def send(self, line: bytes) -> None:
        self._socket.sendall(line)

    def await_end(self) -> None:
        """Return once the leader has closed the connection."""
        with suppress(ConnectionResetError):
            while self._lines.readline():
                pass

    def await_order(self, order: GangOrder) -> None:
        while (line := self._lines.readline()) != encode_order(order):
            assert line

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def serve(size: int) -> tuple[GangServer, int]:
    """A server, and its port."""
    port, leader = free_port(), GangLeader(size, RestartPolicy(RestartLimits()))
    return GangServer(port, size, KEY, leader, lambda _: None), port


@contextmanager
def running(size: int) -> Iterator[tuple[GangServer, int]]:
    leading, port = serve(size)
    try:
        yield leading, port
    finally:
        leading.close()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Members that are closed at the end."""
    opened: list[Member] = []
    yield opened
    for member in opened:
        member.close()


@pytest.mark.parametrize(
    ("index", "is_admitted"),
    [(1, True), (2, True), (0, False), (3, False), (-1, False), ("1", False), (None, False)],
)
def test_only_the_other_nodes_of_the_gang_are_admitted(
    members: list[Member], index: object, is_admitted: bool
) -> None:
    with running(3) as (_, port):
        members.append(Member(port))
        proved = index if isinstance(index, int) else 1
        assert bool(members[0].greet(index, proved)) == is_admitted
        members[0].close()


@pytest.mark.parametrize(("proved", "key"), [(2, KEY), (1, "uid 0")])
def test_a_proof_holds_for_one_node_of_one_attempt(
    members: list[Member], proved: int, key: str
) -> None:
    with running(3) as (_, port):
        members.append(Member(port))
        assert members[0].greet(1, proved, key) == b""


def test_a_stranger_leaves_no_line_in_the_log(
    members: list[Member], capfd: pytest.CaptureFixture[str]
) -> None:
    with running(2) as (_, port):
        members.append(Member(port))
        members[0].greet(5, 5)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "line",
    [
        b'{"index": 1, "nonce": "a", "proof": "b", "time": 1%s}' % (b"0" * 400),
        b'{"index": 1, "nonce": "\\ud800", "proof": "\\ud800", "time": NaN}',
        b'{"index": 1, "time": %s}' % (b"1" * 5000),
        b"[" * 30000,
        b"\xff\xfe{}",
        b"x" * 70000,
        b"[1]",
        b"",
    ],
    ids=lambda line: line[:60].decode(errors="replace"),
)
def test_garbage_leaves_no_line_in_the_log(
    members: list[Member], line: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(2) as (_, port):
        members.append(Member(port))
        members[0].send(line + b"\n")
        members[0].await_end()
        members.append(Member(port))
        assert members[1].greet(1, 1)
    assert capfd.readouterr().err == ""


def test_the_log_names_a_node_whose_messages_are_invalid(
    members: list[Member], capfd: pytest.CaptureFixture[str]
) -> None:
    with running(3) as (_, port):
        members.append(Member(port))
        members[0].greet(2, 2)
        members[0].report(MemberState())
        members[0].send(b"nonsense\n")
        members[0].await_end()
    assert "lost the connection to node 2: " in capfd.readouterr().err


def test_an_order_is_sent_once() -> None:
    orders: list[GangOrder] = []
    leader = GangLeader(2, RestartPolicy(RestartLimits()))
    leading = GangServer(free_port(), 2, KEY, leader, orders.append)
    try:
        leading.call(lambda leader, now: leader.receive(0, MemberState(), now))
        leading.call(GangLeader.open_gate)
        for _ in range(3):
            leading.call(GangLeader.tick)
    finally:
        leading.close()
    assert orders == [OpenGate()]


@pytest.mark.long  # it waits
def test_time_passes_for_the_leader_without_any_event(
    monkeypatch: pytest.MonkeyPatch, members: list[Member]
) -> None:
    monkeypatch.setattr("torchrun_runtime.launch.gang.leader.LOST_SECONDS", 1.0)
    with running(3) as (leading, port):
        leading.call(lambda leader, now: leader.receive(0, MemberState(), now))
        leading.call(GangLeader.open_gate)
        for index in (1, 2):
            members.append(Member(port))
            assert members[-1].greet(index, index)
            members[-1].report(MemberState())
        gone, last = members
        last.await_order(StartRound(0))
        gone.report(MemberState("running", 0))
        gone.close()
        leading.call(lambda leader, now: leader.receive(0, MemberState("succeeded", 0), now))
        last.report(MemberState("succeeded", 0))
        last.await_order(EndGang())
        last.close()


def test_a_leader_that_ends_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_CLOSE_SECONDS", 100.0)
    with running(3):
        pass
