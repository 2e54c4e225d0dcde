"""What a node does about an order."""

from torchrun_runtime.launch.gang.leader import Restarts
from torchrun_runtime.launch.gang.member import GangMember
from torchrun_runtime.launch.gang.messages import (
    NEVER,
    EndGang,
    MemberState,
    NcclTransport,
    StartRound,
    StopRound,
)
from torchrun_runtime.launch.gang.rounds import OrderInbox, Rounds


def test_a_round_that_was_stopped_before_its_start_never_starts() -> None:
    member = GangMember()
    assert member.follow(StopRound(0)) is None
    assert member.state == MemberState("ready", 0)
    assert member.follow(StartRound(0)) is None
    assert member.follow(StartRound(1)) == StartRound(1)


def test_an_order_that_comes_twice_starts_once() -> None:
    member = GangMember()
    assert member.follow(StartRound(0)) == StartRound(0)
    member.end(None, None, stopped=False)
    assert member.follow(StartRound(0)) is None


def test_a_node_that_never_started_does_not_end_with_the_gang_before() -> None:
    member = GangMember()
    assert member.follow(EndGang()) is None
    member.follow(StartRound(0))
    member.end(None, None, stopped=False)
    assert member.follow(EndGang()) == EndGang()


def test_the_network_stays_until_the_next_round_starts() -> None:
    member = GangMember()
    member.follow(StartRound(0))
    member.note_transport(NcclTransport("IB"))
    member.end(None, None, stopped=True)
    assert member.state.transport == NcclTransport("IB")
    member.follow(StartRound(1))
    assert member.state.transport is None


class Leaderless:
    """A link without a connection for ever."""

    def report(self, state: MemberState) -> None:
        pass

    def lost_seconds(self) -> float:
        return float("inf")

    def describe_wait(self) -> str:
        return ""

    def check_reachable(self) -> None:
        pass

    def restarts(self) -> Restarts:
        return Restarts()

    def close(self) -> None:
        pass


class Recorder(Leaderless):
    """A link that keeps what it reports."""

    def __init__(self) -> None:
        self.reports: list[MemberState] = []

    def report(self, state: MemberState) -> None:
        self.reports.append(state)


def test_a_node_that_missed_its_round_ends_without_a_leader() -> None:
    inbox = OrderInbox()
    rounds = Rounds(Leaderless(), inbox, lambda: None)
    assert rounds.newest_round == NEVER
    inbox.put(StopRound(0))
    assert rounds.await_start() is None
    assert rounds.newest_round == 0, "the caller knows that it has missed a round"
