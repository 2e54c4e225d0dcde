"""When a node connects again, what it says about it, and when it gives up."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from ports import free_port, refusing_port
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.gang import connection
from torchrun_runtime.launch.gang.connection import LeaderConnection, keep_alive
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from torchrun_runtime.launch.gang.rounds import OrderInbox
from torchrun_runtime.launch.gang.server import GangServer
from torchrun_runtime.launch.threads import start_thread

OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 3,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 15_000,
}


class Pauses:
    """The event that ends a connection: it passes at once, and ends it after `count` pauses."""

    def __init__(self, count: int) -> None:
        self.taken: list[float] = []
        self.notice: Callable[[int], None] = lambda number: None
        self.ended = threading.Event()
        self._count = count
        if not count:
            self.ended.set()

    def is_set(self) -> bool:
        return self.ended.is_set()

    def set(self) -> None:
        self.ended.set()

    def wait(self, seconds: float) -> None:
        self.taken.append(seconds)
        self.notice(len(self.taken))
        if len(self.taken) == self._count:
            self.ended.set()


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Pauses]:
    """Make the next connection end after some pauses."""

    def make(count: int) -> Pauses:
        pauses = Pauses(count)
        threads = SimpleNamespace(Event=lambda: pauses, Lock=threading.Lock)
        monkeypatch.setattr(connection, "threading", threads)
        return pauses

    return make


def member(port: int, reach_wait: float = 300.0) -> LeaderConnection:
    return LeaderConnection("127.0.0.1", port, 1, "uid 1", OrderInbox(), reach_wait)


def test_the_pauses_between_attempts_grow_up_to_three_seconds(
    paused: Callable[[int], Pauses],
) -> None:
    pauses = paused(7)
    with refusing_port() as port:
        member(port)
        assert pauses.ended.wait(60)
    assert pauses.taken == [0.5, 0.75, 1.125, 1.6875, 2.53125, 3.0, 3.0]


@pytest.fixture
def idle(paused: Callable[[int], Pauses]) -> LeaderConnection:
    """A member that never connects."""
    paused(0)
    return member(1, reach_wait=10.0)


def test_only_a_network_that_does_not_answer_counts_as_unreachable(
    idle: LeaderConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(connection.time, "monotonic", lambda: now)
    idle._error = "timed out"
    idle.check_reachable()
    idle._note_reach(TimeoutError())
    now = 105.0
    idle._note_reach(OSError("no route"))
    now = 109.9
    idle.check_reachable()
    now = 110.0
    with pytest.raises(LaunchError, match=r"node 0 of the gang at 127\.0\.0\.1:1: timed out\. A"):
        idle.check_reachable()
    for waited_for in (ConnectionRefusedError(), socket.gaierror(), ValueError()):
        idle._note_reach(TimeoutError())
        idle._note_reach(waited_for)
        now += 1000
        idle.check_reachable()


def test_a_node_says_for_how_long_it_has_no_connection(
    idle: LeaderConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle._lost_at = 100.0
    monkeypatch.setattr(connection.time, "monotonic", lambda: 107.5)
    assert idle.lost_seconds() == 7.5
    assert idle.describe_wait() == "the other nodes of the gang"
    idle._error = "timed out"
    assert idle.describe_wait() == "node 0 of the gang at 127.0.0.1:1: timed out"
    idle._lost_at = None
    assert idle.lost_seconds() == 0
    assert idle.describe_wait() == "the other nodes of the gang"
    assert idle.leader is None


@pytest.fixture
def connected() -> Iterator[tuple[GangServer, LeaderConnection]]:
    port = free_port()
    leader = GangLeader(2, RestartPolicy(RestartLimits()))
    with ExitStack() as stack:
        running = GangServer(port, 2, "uid 1", leader, lambda _: None)
        stack.callback(running.close)
        joined = member(port)
        stack.callback(joined.close)
        until = time.monotonic() + 60
        while joined.lost_seconds() or 1 in leader.missing():
            assert time.monotonic() < until
            OrderInbox().wait(None, 0.01)
        yield running, joined


def test_both_sides_notice_that_the_other_machine_is_gone(
    connected: tuple[GangServer, LeaderConnection],
) -> None:
    running, joined = connected
    assert joined._socket
    for end in (joined._socket, running._writers[1].get_extra_info("socket")):
        assert {option: end.getsockopt(*option) for option in OPTIONS} == OPTIONS


def test_a_kernel_without_an_option_is_no_error() -> None:
    with socket.socket(socket.AF_UNIX) as other:
        keep_alive(other)


def test_the_pauses_begin_again_after_a_connection(paused: Callable[[int], Pauses]) -> None:
    port, pauses = free_port(), paused(5)
    leader = GangLeader(2, RestartPolicy(RestartLimits()))
    running: list[GangServer] = []
    waits: list[str] = []
    with ExitStack() as stack:

        def pause(number: int) -> None:
            if number == 3:
                running.append(GangServer(port, 2, "uid 1", leader, lambda _: None))
                stack.callback(running[0].close)
            if number == 4:
                waits.append(joined.describe_wait())

        pauses.notice = pause
        joined = member(port)
        until = time.monotonic() + 60
        while 1 in leader.missing():
            assert time.monotonic() < until
            OrderInbox().wait(None, 0.01)
    assert pauses.ended.wait(60)
    assert pauses.taken == [0.5, 0.75, 1.125, 0.5, 0.75]
    assert waits == [f"node 0 of the gang at 127.0.0.1:{port}: the connection was closed"]


def test_a_closed_connection_is_not_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def start(run: Callable[[], None]) -> None:
        threads.append(start_thread(run))

    monkeypatch.setattr(connection, "start_thread", start)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        member(closed.getsockname()[1]).close()
        threads[0].join(60)
        assert not threads[0].is_alive()


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        leader = GangLeader(2, RestartPolicy(RestartLimits()))
        with pytest.raises(LaunchError, match=f"cannot listen on port {port} ") as failure:
            GangServer(port, 2, "uid 1", leader, lambda _: None)
    assert failure.value.reason == "ChannelFailed"
