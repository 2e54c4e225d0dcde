"""What a node does about an order."""

from torchrun_runtime.launch.gang.leader import Restarts
from torchrun_runtime.launch.gang.member import GangMember
from torchrun_runtime.launch.gang.messages import (
    NEVER,
    EndGang,
    MemberState,
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


def test_a_new_pod_of_node_0_ends_with_the_gang_that_it_did_not_bring_together() -> None:
    assert GangMember(replaces_leader=True).follow(EndGang()) == EndGang()


def test_a_node_whose_pod_ends_says_whether_its_command_had_succeeded() -> None:
    member = GangMember()
    member.follow(StartRound(0))
    member.leave()
    assert member.state == MemberState("leaving", 0)
    member = GangMember()
    member.follow(StartRound(0))
    member.end(None, None, stopped=False)
    member.leave()
    assert member.state == MemberState("done", 0)
    member.leave()
    assert member.state == MemberState("done", 0)


class Leaderless:
    """A link without a connection for ever."""

    def report(self, state: MemberState, leader: int) -> None:
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
        self.reports: list[tuple[MemberState, int]] = []

    def report(self, state: MemberState, leader: int) -> None:
        self.reports.append((state, leader))


def test_a_new_leader_hears_of_a_node_once_that_follows_no_older_order() -> None:
    inbox, link = OrderInbox(), Recorder()
    rounds = Rounds(link, inbox, lambda: None)
    inbox.put(StartRound(0))
    assert rounds.await_start() == StartRound(0)
    inbox.put(StopRound(0))
    assert inbox.change_leader() == 1
    assert rounds.stop_order() is None, "the order of the leader before is void"
    running = MemberState("running", 0)
    assert link.reports == [(MemberState(), 0), (running, 0), (running, 1)]
    inbox.put(StopRound(0, lost=True))
    assert rounds.stop_order() == StopRound(0, lost=True)


def test_a_node_without_ranks_waits_for_a_new_leader_as_long_as_the_controller_permits() -> None:
    class Lost(Leaderless):
        def lost_seconds(self) -> float:
            return 100.0

    for wait, ends in ((200.0, False), (90.0, True)):
        inbox = OrderInbox()
        rounds = Rounds(Lost(), inbox, lambda: None, leaderless_seconds=wait)
        inbox.put(StartRound(0))
        assert rounds.await_start() == StartRound(0)
        rounds.end(None, None, stopped=False)
        inbox.put(StartRound(1) if not ends else StopRound(0))
        assert (rounds.await_start() is None) is ends


def test_a_node_that_missed_its_round_ends_without_a_leader() -> None:
    inbox = OrderInbox()
    rounds = Rounds(Leaderless(), inbox, lambda: None)
    assert rounds.newest_round == NEVER
    inbox.put(StopRound(0))
    assert rounds.await_start() is None
    assert rounds.newest_round == 0, "the caller knows that it has missed a round"
