"""The order of queues: smooth weighted round robin."""

from msgspec.structs import replace

from queueing import NOW, admitted, admitted_workload, decide, nodes, queue, request
from torchrun_controller.reconcile.admission.coordinator import MOST_GRANTS, admit
from torchrun_controller.reconcile.admission.model import ClusterState, RoundRobinState


def backlog(weights: dict[str, int], room: int, gpus: int = 8) -> ClusterState:
    return ClusterState(
        nodes=nodes(room),
        queues=tuple(queue(name, weight) for name, weight in weights.items()),
        workloads=tuple(
            request(f"{name}{i}", name, gpus=gpus, age=100 - i)
            for name in weights
            for i in range(9)
        ),
    )


def order(state: ClusterState) -> str:
    return " ".join(one.uid[0] for one in admit(state, NOW).grants)


def test_the_round_robin_is_smooth():
    assert order(backlog({"a": 5, "b": 1, "c": 1}, room=7)) == "a a b a c a a"
    assert order(backlog({"c": 1, "b": 1, "a": 5}, room=7)) == "a a b a c a a"


def test_the_round_robin_continues_over_decisions():
    """One node is free at a time, and admitted jobs have ended by the next decision."""
    state, taken = backlog({"a": 5, "b": 1, "c": 1}, room=1), []
    for _ in range(7):
        decisions = admit(state, NOW)
        (one,) = decisions.grants
        taken.append(one.uid[0])
        turns = {summary.name: summary.round_robin for summary in decisions.queues}
        state = replace(
            state,
            queues=tuple(replace(q, round_robin=turns[q.name]) for q in state.queues),
            workloads=tuple(r for r in state.workloads if r.uid != one.uid),
        )
    assert " ".join(taken) == "a a b a c a a"


def test_jobs_without_gpus_are_charged_by_their_nodes():
    assert order(backlog({"a": 5, "b": 1, "c": 1}, room=7, gpus=0)).startswith("a a b a c a a")


def test_turns_are_charged_by_gpus():
    small = [request(f"s{i}", "small", gpus=4, age=9 - i) for i in range(9)]
    large = [request(f"l{i}", "large", 2, age=9 - i) for i in range(9)]
    decisions = decide(nodes(8), [queue("small"), queue("large")], *small, *large)
    gpus = {summary.name: summary.used.gpus for summary in decisions.queues}
    assert gpus == {"small": 32, "large": 32}


def test_a_weight_that_is_not_set_counts_as_one():
    assert decide(nodes(1), [queue("a", None)], request("j", "a")).queues[0].round_robin.weight == 1


def turns(decisions):
    return {summary.name: summary.round_robin.current for summary in decisions.queues}


def test_a_queue_without_quota_is_skipped():
    queues = [
        queue("a", 1, quota={"jobs": 1}, round_robin=RoundRobinState(weight=1, current=7)),
        queue("b", 2, round_robin=RoundRobinState(weight=2, current=-3)),
        queue("c", 1, round_robin=RoundRobinState(weight=1, current=0)),
    ]
    asked = [request("a-2", "a"), request("b-1", "b"), request("b-2", "b"), request("c-1", "c")]
    decisions = decide(nodes(9), queues, admitted_workload("a-1", "a"), *asked)
    assert admitted(decisions) == ["b-1", "b-2", "c-1"]
    assert turns(decisions)["a"] == 7


def test_a_queue_without_jobs_starts_from_nothing():
    idle = queue("a", round_robin=RoundRobinState(weight=1, current=-50))
    decisions = decide(nodes(1), [idle], admitted_workload("h", "a"))
    assert decisions.queues[0].round_robin == RoundRobinState(weight=1)


def test_a_new_weight_resets_the_round_robin():
    queues = [
        queue("a", 2, round_robin=RoundRobinState(weight=1, current=-50)),
        queue("b", 1, round_robin=RoundRobinState(weight=1, current=50)),
        queue("new", 1),
    ]
    asked = [request(f"{name}-{i}", name) for name in "ab" for i in range(3)]
    asked.append(admitted_workload("full", "new"))
    assert turns(decide(nodes(1), queues, *asked)) == {"a": 0, "b": 0, "new": 0}
    queues[0] = queue("a", 1, round_robin=RoundRobinState(weight=1, current=-50))
    assert turns(decide(nodes(1), queues, *asked)) == {"a": -50, "b": 50, "new": 0}


def state_of(weight: int, value: int) -> RoundRobinState:
    return RoundRobinState(weight=weight, current=value)


def states(decisions):
    return {summary.name: summary.round_robin for summary in decisions.queues}


def test_a_debt_ends_when_its_creditor_stops_to_wait():
    """Queue a was served while b waited. A new queue does not come before a as often."""
    queues = [
        queue("a", round_robin=state_of(1, -4800)),
        queue("b", round_robin=state_of(1, 4800)),
        queue("new"),
    ]
    asked = [request(f"{name}-{i}", name) for name in ("a", "new") for i in range(4)]
    assert admitted(decide(nodes(4), queues, *asked)) == ["a-0", "a-1", "new-0", "new-1"]
    # The same if b is deleted.
    del queues[1]
    assert admitted(decide(nodes(4), queues, *asked)) == ["a-0", "a-1", "new-0", "new-1"]


def test_queues_owe_no_more_than_others_that_wait_have_not_got():
    queues = [
        queue("a", 3, round_robin=state_of(3, -501)),
        queue("b", 1, round_robin=state_of(1, 501)),
        queue("c", 1, round_robin=state_of(1, 100)),
        queue("d", 2, round_robin=state_of(2, -100)),
        queue("e", 2, paused_reason="It is paused.", round_robin=state_of(2, -900)),
        queue("f", 2, paused_reason="It is paused.", round_robin=state_of(2, 900)),
    ]
    full = admitted_workload("full", "b")
    asked = [request(f"{name}-1", name) for name in "acdef"]
    decided = states(decide(nodes(1), queues, full, *asked))
    assert {name: state.current for name, state in decided.items()} == {
        "a": -83,
        "b": 0,
        "c": 100,
        "d": -16,
        "e": -900,
        "f": 900,
    }
    # Nothing is forgiven while the others wait.
    decided = states(decide(nodes(1), queues, full, *asked, request("b-1", "b")))
    assert (decided["a"].current, decided["d"].current) == (-501, -100)


def test_a_queue_that_waits_keeps_its_credit_when_its_debtor_leaves():
    queues = [queue("a", round_robin=state_of(1, -48)), queue("b", round_robin=state_of(1, 48))]
    full = admitted_workload("full", "a")
    decisions = decide(nodes(1), queues, full, request("b-1", "b"))
    assert states(decisions) == {"a": state_of(1, 0), "b": state_of(1, 48)}
    assert admitted(decide(nodes(1), queues, request("a-1", "a"), request("b-1", "b"))) == ["b-1"]


def test_a_queue_that_submits_one_job_at_a_time_starves_no_other():
    queues, taken = [queue("a"), queue("b")], ""
    for i in range(6):
        asked = [request(f"a-{i}", "a"), *(request(f"b-{k}", "b") for k in range(9))]
        for jobs in (asked, [admitted_workload("full", "z"), *asked[1:]]):
            decisions = decide(nodes(1), queues, *jobs)
            queues = [replace(q, round_robin=states(decisions)[q.name]) for q in queues]
            taken += "".join(uid[0] for uid in admitted(decisions))
    assert taken == "ab" * 3


def test_priority_comes_before_age():
    asked = [request("old", "a", age=9), request("vip", "a", age=1, priority=1)]
    assert admitted(decide(nodes(1), [queue("a")], *asked)) == ["vip"]


def test_backfill_prefers_the_least_served_queue_and_is_charged():
    queues = [
        queue("a", round_robin=RoundRobinState(weight=1, current=999)),
        queue("b", round_robin=RoundRobinState(weight=1, current=-100)),
        queue("c", round_robin=RoundRobinState(weight=1, current=100)),
    ]
    asked = [
        request("head", "a", 3),
        *(request(f"{name}-{i}", name, seconds_left=60) for name in "bc" for i in range(2)),
    ]
    running = admitted_workload("r", "a", seconds_left=3600)
    decisions = decide(nodes(3), queues, running, *asked)
    assert admitted(decisions) == ["c-0", "c-1"]
    assert turns(decisions) == {"a": 999 + 16, "b": -84, "c": 100 + 16 - 3 * 16}


def test_large_decisions_are_split():
    state = ClusterState(
        nodes=nodes(MOST_GRANTS + 50),
        queues=(queue("a"),),
        workloads=tuple(request(f"j{i:03}", "a", age=999 - i) for i in range(MOST_GRANTS + 60)),
    )
    decisions = admit(state, NOW)
    assert len(decisions.grants) == MOST_GRANTS
    assert decisions.requeue_after == 0
    assert len(decisions.pending) == 60
    small = [
        request(f"s{i:03}", "a", 1, 1, age=1, seconds_left=60) for i in range(MOST_GRANTS + 60)
    ]
    head, running = request("head", "a", 40, age=9), admitted_workload("r", "a", seconds_left=3600)
    decisions = decide(nodes(40), [queue("a")], running, head, *small)
    assert len(decisions.grants) == MOST_GRANTS
    assert decisions.requeue_after == 0
    assert decisions.pending["head"].reason == "WaitingForNodes"


def test_a_full_decision_grows_no_gang():
    grows = admitted_workload("grows", "b", 2, admitted=1)
    jobs = [request(f"j{i:03}", "a", age=999 - i) for i in range(MOST_GRANTS)]
    decisions = decide(nodes(MOST_GRANTS + 9), [queue("a"), queue("b")], grows, *jobs)
    assert len(decisions.grants) == MOST_GRANTS
    assert "grows" not in admitted(decisions)
