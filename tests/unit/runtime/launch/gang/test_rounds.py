"""What a node does between rounds: it looks, passes its gate once, waits, leaves."""

import socket
from contextlib import closing

import pytest

from ports import free_port
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.gang import rounds
from torchrun_runtime.launch.gang.leader import NO_PREDECESSOR, Predecessor
from torchrun_runtime.launch.gang.messages import (
    EndGang,
    GangOrder,
    MemberState,
    OpenGate,
    RoundCode,
    StartRound,
    StopRound,
)
from torchrun_runtime.launch.gang.policy import RestartLimits
from torchrun_runtime.launch.gang.rounds import GangNode, OrderInbox, OwnLink, Rounds, lead
from unit.runtime.launch.gang.test_member import Leaderless, Recorder


class Orders(OrderInbox):
    """Gives the next order whenever the node waits for one."""

    def __init__(self, *orders: GangOrder) -> None:
        super().__init__()
        self.waits: list[tuple[GangOrder | None, float]] = []
        self._orders = list(orders)

    def wait(self, known: GangOrder | None, seconds: float) -> None:
        self.waits.append((known, seconds))
        self.put(self._orders.pop(0))


def test_the_gate_is_passed_once_when_it_is_open() -> None:
    passed: list[int] = []
    inbox = Orders(EndGang(), OpenGate(), OpenGate(), StartRound(0))
    node = Rounds(Leaderless(), inbox, lambda: None, lambda: passed.append(len(inbox.waits)))
    assert node.await_start() == StartRound(0)
    assert passed == [2], "neither without an order nor for the end of the gang before"
    assert inbox.waits == [
        (order, rounds._POLL) for order in (None, EndGang(), OpenGate(), OpenGate())
    ]


def test_a_node_looks_before_each_decision() -> None:
    looks: list[str] = []
    inbox = OrderInbox()
    node = Rounds(Leaderless(), inbox, lambda: looks.append("look"))
    inbox.put(StartRound(0))
    node.await_start()
    assert len(looks) == 1
    node.stop_order()
    assert len(looks) == 2
    node.end(None, None, stopped=False)
    assert len(looks) == 3


def test_a_node_that_is_asked_to_end_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "is_stopping", lambda: True)
    link = Recorder()
    assert Rounds(link, OrderInbox(), lambda: None).await_start() is None
    assert link.reports == [MemberState(), MemberState("leaving")]


def test_the_end_of_a_round_is_reported() -> None:
    link, inbox = Recorder(), OrderInbox()
    node = Rounds(link, inbox, lambda: None)
    inbox.put(StartRound(0))
    node.await_start()
    node.end(None, 7, stopped=False)
    assert link.reports[-1] == MemberState("succeeded", 0, step=7)


def test_a_leader_that_cannot_be_reached_ends_the_wait() -> None:
    class Unreachable(Leaderless):
        def check_reachable(self) -> None:
            raise LaunchError("ChannelFailed", "no route")

    with pytest.raises(LaunchError, match="no route"):
        Rounds(Unreachable(), Orders(StartRound(0)), lambda: None).await_start()


@pytest.mark.parametrize(("lost", "ends"), [(15.0, False), (15.1, True)])
def test_a_node_that_has_started_waits_fifteen_seconds_for_its_leader(
    lost: float, ends: bool
) -> None:
    class Lost(Leaderless):
        def lost_seconds(self) -> float:
            return lost

    node = Rounds(Lost(), Orders(StartRound(0), StopRound(0), StartRound(1)), lambda: None)
    assert node.await_start() == StartRound(0), "before that, it waits as long as it takes"
    node.end(None, None, stopped=False)
    assert (node.await_start() is None) is ends


@pytest.mark.parametrize(("rank", "port", "leads"), [(0, 1, True), (1, 1, False), (1, 0, True)])
def test_node_0_leads_or_each_node_itself(rank: int, port: int, leads: bool) -> None:
    assert GangNode(rank, 2, "", port, "").is_leader == leads


@pytest.mark.parametrize(("size", "has_port"), [(1, True), (3, False)])
def test_a_node_without_others_opens_no_port(size: int, has_port: bool) -> None:
    port = free_port() if has_port else 0
    inbox = OrderInbox()
    node = GangNode(0, size, "", port, "key")
    with closing(OwnLink(node, RestartLimits(), inbox)) as own:
        own.report(MemberState())
        own.open_gate(NO_PREDECESSOR)
        assert inbox.order == StartRound(0)
        with socket.create_server(("", port)):
            pass


def test_the_port_may_be_taken_until_the_gate_is_open() -> None:
    """On the network of the host, by the leader of the gang before."""
    port, looks = free_port(), []
    node = GangNode(0, 2, "", port, "key")
    with socket.create_server(("", port)) as other:

        def pass_gate() -> Predecessor:
            looks.append("gate")
            other.close()
            return NO_PREDECESSOR

        leading = lead(node, RestartLimits(), pass_gate, lambda _: looks.append("look"))
    with closing(leading), pytest.raises(OSError, match="in use"):
        socket.create_server(("", port))
    assert looks == ["gate", "look"]


def test_a_port_that_stays_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_PORT_SECONDS", 0.1)
    with socket.create_server(("", 0)) as other:
        node = GangNode(0, 2, "", other.getsockname()[1], "key")
        with pytest.raises(LaunchError, match="cannot listen on port"):
            lead(node, RestartLimits(), lambda: NO_PREDECESSOR, lambda _: None)


def test_newer_code_is_noticed_between_rounds_and_while_ranks_run() -> None:
    revision = 1
    node = GangNode(0, 1, "", 0, "")
    with closing(
        lead(
            node,
            RestartLimits(),
            lambda: NO_PREDECESSOR,
            lambda link: link.announce(RoundCode(revision), 0.0),
        )
    ) as leading:
        assert leading.await_start() == StartRound(0, RoundCode(1))
        assert leading.stop_order() is None
        revision = 2
        assert leading.stop_order() == StopRound(0, failed=False)
        leading.end(None, None, stopped=True)
        assert leading.await_start() == StartRound(1, RoundCode(2))
        assert leading.restarts().total == 0
