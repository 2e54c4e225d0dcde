"""The connections between the leader and the members: who may join, and what each side hears."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from ports import free_port
from torchrun_runtime.launch.gang import connection
from torchrun_runtime.launch.gang.connection import LeaderConnection
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.messages import GangOrder, MemberState, StartRound
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from torchrun_runtime.launch.gang.rounds import OrderInbox
from torchrun_runtime.launch.gang.server import GangServer

GARBAGE = (
    *(b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"index": "x"}\n'),
    *(b"x" * 100_000, b"[" * 60_000 + b"\n"),
)


@contextmanager
def server(size: int, key: str = "uid 1") -> Iterator[tuple[GangServer, int]]:
    port = free_port()
    running = GangServer(
        port, size, key, GangLeader(size, RestartPolicy(RestartLimits())), lambda _: None
    )
    try:
        yield running, port
    finally:
        running.close()


def await_order(inbox: OrderInbox, expected: GangOrder) -> None:
    until = time.monotonic() + 60
    while inbox.order != expected and time.monotonic() < until:
        inbox.wait(inbox.order, 1)
    assert inbox.order == expected


def test_a_launcher_of_another_attempt_gets_no_order() -> None:
    with server(2) as (leader, port), ExitStack() as stack:
        inboxes = [OrderInbox(), OrderInbox()]
        for inbox, key in zip(inboxes, ("uid 0", "uid 1"), strict=True):
            member = LeaderConnection("127.0.0.1", port, 1, key, inbox)
            stack.callback(member.close)
        leader.call(lambda state, now: state.receive(0, MemberState(), now))
        leader.call(GangLeader.open_gate)
        await_order(inboxes[1], StartRound(0))
        assert inboxes[0].order is None


def test_garbage_does_not_disturb_the_leader() -> None:
    with server(2) as (leader, port), ExitStack() as stack:
        for garbage in GARBAGE:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.settimeout(60)
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        inbox = OrderInbox()
        member = LeaderConnection("127.0.0.1", port, 1, "uid 1", inbox)
        stack.callback(member.close)
        leader.call(lambda state, now: state.receive(0, MemberState(), now))
        leader.call(GangLeader.open_gate)
        await_order(inbox, StartRound(0))


def test_a_member_connects_again_after_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RETRY_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(60)
        port = stranger.getsockname()[1]
        member = LeaderConnection("127.0.0.1", port, 1, "uid 1", OrderInbox())
        try:
            for garbage in GARBAGE:
                accepted = stranger.accept()[0]
                with accepted, suppress(OSError):
                    accepted.sendall(garbage)
            stranger.accept()[0].close()
        finally:
            member.close()


def test_a_leader_serves_a_large_gang() -> None:
    size = 400
    with server(size) as (leader, port), ExitStack() as stack:
        inboxes = []
        for index in range(1, size):
            inboxes.append(OrderInbox())
            member = LeaderConnection("127.0.0.1", port, index, "uid 1", inboxes[-1])
            stack.callback(member.close)
        leader.call(lambda state, now: state.receive(0, MemberState(), now))
        leader.call(GangLeader.open_gate)
        for inbox in inboxes:
            await_order(inbox, StartRound(0))


def test_a_second_launcher_of_a_node_joins_no_round_that_has_started() -> None:
    with server(2) as (leader, port), ExitStack() as stack:
        inboxes = [OrderInbox(), OrderInbox()]
        first = LeaderConnection("127.0.0.1", port, 1, "uid 1", inboxes[0])
        stack.callback(first.close)
        leader.call(lambda state, now: state.receive(0, MemberState(), now))
        leader.call(GangLeader.open_gate)
        await_order(inboxes[0], StartRound(0))
        second = LeaderConnection("127.0.0.1", port, 1, "uid 1", inboxes[1])
        stack.callback(second.close)
        while "not a message" not in second.describe_wait():
            inboxes[1].wait(None, 0.05)
        assert inboxes[1].order is None


@contextmanager
def member_of_a_gang_that_has_started(inbox: OrderInbox) -> Iterator[tuple[LeaderConnection, int]]:
    """A member, and the port of its leader, which has ended."""
    with ExitStack() as stack:
        with server(2) as (leader, port):
            member = LeaderConnection("127.0.0.1", port, 1, "uid 1", inbox)
            stack.callback(member.close)
            leader.call(lambda state, now: state.receive(0, MemberState(), now))
            leader.call(GangLeader.open_gate)
            await_order(inbox, StartRound(0))
            member.report(MemberState("running", 0))
        yield member, port


@contextmanager
def another_server(port: int) -> Iterator[tuple[GangServer, list[GangOrder]]]:
    """A leader after the first one, and its orders."""
    orders: list[GangOrder] = []
    leader = GangLeader(2, RestartPolicy(RestartLimits()))
    running = GangServer(port, 2, "uid 1", leader, orders.append)
    try:
        yield running, orders
    finally:
        running.close()


def test_a_node_that_has_started_follows_no_other_leader() -> None:
    inbox = OrderInbox()
    with (
        member_of_a_gang_that_has_started(inbox) as (member, port),
        another_server(port) as (_, orders),
    ):
        while "not the launcher that started" not in member.describe_wait():
            inbox.wait(inbox.order, 0.05)
        assert orders == []


def test_a_launcher_that_refuses_the_leader_does_not_keep_others_from_its_node() -> None:
    """As a pod that a suspension of the Job deletes."""
    inbox = OrderInbox()
    with (
        member_of_a_gang_that_has_started(OrderInbox()) as (old, port),
        another_server(port) as (leader, _),
        ExitStack() as stack,
    ):
        while "not the launcher that started" not in old.describe_wait():
            inbox.wait(inbox.order, 0.05)
        new = LeaderConnection("127.0.0.1", port, 1, "uid 1", inbox)
        stack.callback(new.close)
        leader.call(lambda state, now: state.receive(0, MemberState(), now))
        leader.call(GangLeader.open_gate)
        while inbox.order != StartRound(0):
            assert "not a message" not in new.describe_wait()
            inbox.wait(inbox.order, 0.05)


def test_the_latest_launcher_of_a_node_takes_part_if_no_rank_has_started() -> None:
    """A pod that a suspension of the Job deletes may never have met a leader, and end late."""
    inbox = OrderInbox()
    with server(2) as (leader, port), ExitStack() as stack:
        old = LeaderConnection("127.0.0.1", port, 1, "uid 1", OrderInbox())
        stack.callback(old.close)
        while leader.leader.missing() != [0]:
            inbox.wait(None, 0.05)
        new = LeaderConnection("127.0.0.1", port, 1, "uid 1", inbox)
        stack.callback(new.close)
        while new.lost_seconds() or not old.lost_seconds():
            inbox.wait(None, 0.05)
        old.close()
        leader.call(lambda state, now: state.receive(0, MemberState(), now))
        leader.call(GangLeader.open_gate)
        await_order(inbox, StartRound(0))


def test_a_launcher_whose_place_another_one_takes_connects_again() -> None:
    inbox = OrderInbox()
    with server(2) as (leader, port), ExitStack() as stack:
        launchers = []
        for _ in range(2):
            launchers.append(LeaderConnection("127.0.0.1", port, 1, "uid 1", OrderInbox()))
            stack.callback(launchers[-1].close)
            while leader.leader.missing() != [0] or launchers[-1].lost_seconds():
                inbox.wait(None, 0.05)
        while not launchers[0].lost_seconds():
            inbox.wait(None, 0.05)
