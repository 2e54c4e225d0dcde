"""The leader's decisions on a planned stop: when it proposes, commits, asks again and refuses."""

import pytest

from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.messages import (
    RUNNING,
    SUCCEEDED,
    EndGang,
    InvalidMessageError,
    MemberState,
    StartRound,
)
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from torchrun_runtime.launch.gang.stopping import (
    ACCEPTS,
    ASKED,
    COMMITTED,
    DECLINES,
    DONE,
    PROPOSAL_SECONDS,
    PROPOSED,
    REACHED,
    REFUSED,
    SAVE,
    STOP,
    Agreement,
    Vote,
    decode_agreement,
    decode_vote,
    encode_agreement,
    encode_vote,
)

ASK = Vote(0, wants=STOP, seconds=25.0)
SAVES = Vote(0, wants=SAVE)


def gang() -> GangLeader:
    """Two nodes whose ranks run."""
    leader = GangLeader(2, RestartPolicy(RestartLimits()))
    for index in range(2):
        leader.receive(index, MemberState(), 0)
    leader.open_gate(0)
    for index in range(2):
        leader.receive(index, MemberState(RUNNING, 0), 0)
    return leader


def state(leader: GangLeader) -> str:
    assert leader.agreement is not None
    return leader.agreement.state


def answer(leader: GangLeader, now: float = 0.1, wants: Vote = ASK, **more: object) -> None:
    """Both nodes vote on the present question; node 1 wants the stop."""
    assert leader.agreement is not None
    vote = {"number": leader.agreement.number, "earliest": 50, "step": 0.02, **more}
    leader.receive_vote(1, wants._replace(**vote), now)
    leader.receive_vote(0, Vote(0)._replace(**vote), now)


def test_all_nodes_answer_and_accept_before_the_commit_which_ends_the_gang() -> None:
    leader = gang()
    leader.receive_vote(1, ASK, 0)
    assert state(leader) == ASKED
    answer(leader)
    assert leader.agreement is not None
    assert (state(leader), leader.agreement.call) == (PROPOSED, 50)
    leader.receive_vote(1, ASK._replace(number=1, verdict=ACCEPTS), 0.2)
    assert state(leader) == PROPOSED
    assert isinstance(leader.order, StartRound)
    leader.receive_vote(0, Vote(0, number=1, verdict=ACCEPTS), 0.2)
    assert state(leader) == COMMITTED
    assert leader.agreement.seconds == pytest.approx(24.8)
    assert leader.order == EndGang()


def test_the_call_is_one_that_no_rank_reaches_before() -> None:
    leader = gang()
    leader.receive_vote(1, ASK, 0)
    leader.receive_vote(1, ASK._replace(number=1, earliest=7), 0)
    leader.receive_vote(0, Vote(0, number=1, earliest=9), 0)
    assert leader.agreement is not None
    assert leader.agreement.call == 9


def test_after_a_rank_has_passed_the_call_all_are_asked_again_with_more_time() -> None:
    leader = gang()
    leader.receive_vote(1, ASK, 0)
    answer(leader)
    answer(leader, verdict=DECLINES)
    assert leader.agreement == Agreement(0, 2, STOP, ASKED, margin=0.5)


def test_an_old_proposal_is_never_committed() -> None:
    leader = gang()
    leader.receive_vote(1, ASK, 0)
    answer(leader)
    answer(leader, now=0.1 + PROPOSAL_SECONDS, verdict=ACCEPTS)
    assert state(leader) == ASKED


def test_nothing_is_committed_while_a_node_has_no_connection() -> None:
    leader = gang()
    leader.receive_vote(1, ASK, 0)
    answer(leader)
    leader.lose(0, 0.2)
    answer(leader, now=0.3, verdict=ACCEPTS)
    assert state(leader) == PROPOSED


def test_no_agreement_in_time_is_refused() -> None:
    leader = gang()
    leader.receive_vote(1, ASK, 0)
    leader.lose(0, 1)
    leader.tick(9.9)
    assert state(leader) == ASKED
    leader.tick(10)
    assert leader.agreement is not None
    assert (state(leader), leader.agreement.why) == (REFUSED, "node 0 has no connection")


@pytest.mark.parametrize(
    ("vote", "why"),
    [
        ({"obstacle": "rank 3 makes no calls"}, "node 1: rank 3 makes no calls"),
        ({"expected": 20.0}, "the ranks need 20 s for their present step"),
    ],
)
def test_a_stop_that_cannot_be_reached_is_refused_once_and_for_all(
    vote: "dict[str, object]", why: str
) -> None:
    leader = gang()
    leader.receive_vote(1, ASK, 0)
    answer(leader, **vote)
    assert leader.agreement is not None
    assert (state(leader), leader.agreement.why) == (REFUSED, why)
    leader.receive_vote(0, ASK, 1)
    assert state(leader) == REFUSED
    assert isinstance(leader.order, StartRound)


def test_a_node_whose_ranks_have_ended_refuses() -> None:
    leader = gang()
    leader.receive(0, MemberState(SUCCEEDED, 0), 1)
    leader.receive_vote(1, ASK, 1)
    assert leader.agreement is not None
    assert leader.agreement.why == "the ranks of node 0 do not run"


def test_a_save_is_done_once_all_have_reached_it_and_another_may_follow() -> None:
    leader = gang()
    leader.receive_vote(1, SAVES, 0)
    answer(leader, wants=SAVES)
    answer(leader, wants=SAVES, verdict=ACCEPTS)
    assert state(leader) == COMMITTED
    assert isinstance(leader.order, StartRound)
    answer(leader, wants=SAVES._replace(wants=""), verdict=REACHED)
    assert state(leader) == DONE
    leader.receive_vote(1, SAVES, 5)
    assert state(leader) == DONE, "a vote from before the save wants no other one"
    leader.receive_vote(1, SAVES._replace(after=1), 6)
    assert leader.agreement == Agreement(0, 2, SAVE, ASKED, margin=0.25)


def test_a_stop_replaces_a_save_that_is_not_committed() -> None:
    leader = gang()
    leader.receive_vote(1, SAVES, 0)
    answer(leader, wants=SAVES)
    leader.receive_vote(0, ASK, 0.2)
    assert leader.agreement == Agreement(0, 2, STOP, ASKED, margin=0.25)


def test_another_round_begins_without_an_agreement() -> None:
    leader = gang()
    leader.receive_vote(1, ASK._replace(round=1), 0)
    assert leader.agreement is None


def test_lines_are_read_as_written_and_others_are_refused() -> None:
    agreement = Agreement(1, 2, STOP, COMMITTED, 52, 24.5, 0.25, "why")
    assert decode_agreement(encode_agreement(agreement)) == agreement
    vote = Vote(1, STOP, 24.5, 1, 2, "no", 52, 1.5, 0.02, ACCEPTS)
    assert decode_vote(encode_vote(vote)) == vote
    assert decode_vote(b'{"state": "ready", "round": 0}\n') is None
    for line in (
        b'{"agreement": 1}\n',
        b'{"agreement": {"round": 0}}\n',
        encode_agreement(agreement._replace(state="other")),
    ):
        with pytest.raises(InvalidMessageError):
            decode_agreement(line)
