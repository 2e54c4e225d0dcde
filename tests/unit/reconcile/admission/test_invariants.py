"""Invariants of a decision for random nodes, queues and jobs."""

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from queueing import GPU, NOW, admitted_workload, node, queue, request
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.model import ClusterState, Decisions
from torchrun_controller.reconcile.admission.quota import RESOURCES, usage_of

AMOUNT = st.none() | st.integers(0, 24)
ZONE = st.sampled_from(["a", "b"])
QUEUES = ["p", "q", "r", "s"]


@st.composite
def queues(draw, name):
    quota = {
        kind: draw(AMOUNT) for kind in draw(st.sets(st.sampled_from(["nodes", "gpus", "jobs"])))
    }
    return queue(
        name,
        draw(st.sampled_from([None, 0, 1, 1, 3, 5])),
        quota=quota,
        cohort=draw(st.sampled_from(["", "c", "c"])),
        paused_reason=draw(st.sampled_from(["", "", "", "its quota cannot be read"])),
    )


@st.composite
def requests(draw, number, names):
    kind = draw(st.sampled_from([request, request, admitted_workload]))
    nodes = draw(st.integers(1, 3))
    made = kind(
        f"j{number}",
        draw(st.sampled_from(QUEUES)),
        nodes,
        draw(st.sampled_from([0, 1, 2, 4, 8])),
        priority=draw(st.integers(0, 2)),
        seconds_left=draw(st.none() | st.integers(0, 20)),
        node_selector=draw(st.sampled_from([{}, {}, {"zone": "a"}, {"zone": "b"}])),
    )
    if nodes > 1 and draw(st.booleans()):
        gpus = draw(st.integers(0, made.gpus))
        made = replace(made, head={GPU: gpus} if gpus else {"cpu": 500}, head_gpus=gpus)
    if kind is request:
        return replace(made, nominated=draw(st.booleans()))
    most = made.workers(nodes)
    placed = Counter(draw(st.lists(st.sampled_from([*names, "gone"]), max_size=most)))
    asked = draw(st.sampled_from([nodes, nodes, nodes + 1, max(1, nodes - 1)]))
    leaving = draw(st.sampled_from(["", "", "j0", "nobody"]))
    return replace(
        made,
        nodes=asked,
        pods_by_node=dict(placed),
        preempted_for=leaving,
        is_deleted=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def states(draw):
    names = [f"n{i}" for i in range(draw(st.integers(0, 4)))]
    machines = tuple(
        node(
            name,
            draw(st.sampled_from([0, 4, 8])),
            labels={"zone": draw(ZONE)},
            usable=draw(st.booleans()),
        )
        for name in names
    )
    taking_part = draw(st.lists(st.sampled_from(QUEUES), unique=True))
    return ClusterState(
        nodes=draw(st.sampled_from([machines, machines, machines, None])),
        queues=tuple(draw(queues(name)) for name in taking_part),
        workloads=tuple(draw(requests(i, names)) for i in range(draw(st.integers(0, 10)))),
    )


def check(state: ClusterState, decisions: Decisions) -> None:
    asked = {one.uid: one for one in state.workloads}
    admitted = {one.uid: one for one in decisions.grants}
    assert len(admitted) == len(decisions.grants)
    every_workload_has_a_result(state, decisions, asked, admitted)
    gangs_are_whole_and_fit(state, asked, admitted)
    quotas_hold(state, asked, admitted)
    victims_are_fair_game(state, decisions, asked, admitted)


def every_workload_has_a_result(state, decisions, asked, admitted):
    open_queues = {q.name for q in state.queues if q.weight != 0 and not q.paused_reason}
    queue_names = {q.name for q in state.queues}
    for one in state.workloads:
        if one.admitted == 0:
            assert (one.uid in admitted) + (one.uid in decisions.pending) == (
                one.queue in queue_names
            )
        if one.uid in admitted and one.nodes > one.admitted:
            assert one.queue in open_queues
        assert one.uid not in admitted or admitted[one.uid].nodes == one.nodes
    for wait in decisions.pending.values():
        assert wait.message
        assert wait.nominated == (wait.reason == "Preempting")
    for name in queue_names:
        positions = [w.position for uid, w in decisions.pending.items() if asked[uid].queue == name]
        in_line = sorted(position for position in positions if position)
        assert in_line == list(range(1, len(in_line) + 1))


def gangs_are_whole_and_fit(state, asked, admitted):
    if state.nodes is None:
        return
    machines = {machine.name: machine for machine in state.nodes}
    used = {name: Counter() for name in machines}
    placements = [(one, one.pods_by_node) for one in state.workloads]
    for uid, one in admitted.items():
        wanted = asked[uid]
        more = one.nodes - wanted.admitted if wanted.admitted else wanted.workers(one.nodes)
        assert sum(one.placement.values()) == max(0, more)
        placements.append((asked[uid], one.placement))
        for name in one.placement:
            machine = machines[name]
            assert machine.usable
            assert asked[uid].node_selector.items() <= machine.labels.items()
    for one, placed in placements:
        for name in placed.keys() & machines.keys():
            for resource, amount in one.pod.items():
                used[name][resource] += amount * placed[name]
    for uid, one in admitted.items():
        for name in one.placement:
            for resource in asked[uid].pod:
                assert used[name][resource] <= machines[name].allocatable[resource]


def used(state, admitted, members, index):
    """What the queues use of a resource after the decision; the preempted jobs still run."""
    total = 0
    for one in state.workloads:
        if one.queue in members:
            now = admitted[one.uid].nodes if one.uid in admitted else one.admitted
            total += usage_of(one, max(now, one.admitted), 1 if now else 0)[index]
    return total


def quotas_hold(state, asked, admitted):
    by_name = {one.name: one for one in state.queues}
    for uid in admitted:
        mine = by_name.get(asked[uid].queue)
        if mine is None or asked[uid].nodes <= asked[uid].admitted:
            continue
        jobs = 0 if asked[uid].admitted else 1
        need = usage_of(asked[uid], asked[uid].nodes - asked[uid].admitted, jobs)
        for index, kind in enumerate(RESOURCES):
            if asdict(mine.quota)[kind] is None or not need[index]:
                continue
            cohort = [
                q for q in state.queues if q is mine or (q.cohort and q.cohort == mine.cohort)
            ]
            limits = {q.name: asdict(q.quota)[kind] for q in cohort}
            limited = {name: limit for name, limit in limits.items() if limit is not None}
            assert used(state, admitted, limited, index) <= sum(limited.values())


def victims_are_fair_game(state, decisions, asked, admitted):
    by_name = {one.name: one for one in state.queues}
    seen = set()
    for one in decisions.preemptions:
        victim, winner = asked[one.uid], asked[one.for_uid]
        assert victim.admitted
        assert not victim.preempted_for
        assert not victim.is_deleted
        assert one.uid not in seen
        seen.add(one.uid)
        assert decisions.pending[one.for_uid].nominated
        if one.reason == "HigherPriority":
            assert victim.queue == winner.queue
            assert victim.priority < winner.priority
        else:
            assert victim.queue != winner.queue
            lender, borrower = by_name[winner.queue], by_name[victim.queue]
            assert lender.cohort == borrower.cohort != ""
            needed = usage_of(winner, winner.nodes)
            # The queue borrows what the winner needs, with the grants of this decision.
            assert any(
                needed[index]
                and asdict(lender.quota)[kind] is not None
                and (limit := asdict(borrower.quota)[kind]) is not None
                and used(state, admitted, {borrower.name}, index) > limit
                for index, kind in enumerate(RESOURCES)
            )


def test_a_grant_of_the_same_decision_can_make_a_queue_borrow():
    """The new job of queue b is granted on other nodes than the head of queue a could use."""
    machines = tuple(node(f"n{zone}", labels={"zone": zone}) for zone in "ab")
    old = admitted_workload("old", "b", pods_by_node={"na": 1}, node_selector={"zone": "a"})
    new = request("new", "b", node_selector={"zone": "b"})
    head = request("head", "a", node_selector={"zone": "a"})
    sharing = (
        queue(name, weight, quota={"gpus": 8}, cohort="c") for name, weight in (("a", 1), ("b", 9))
    )
    state = ClusterState(nodes=machines, queues=tuple(sharing), workloads=(old, new, head))
    decisions = admit(state, NOW)
    assert [one.uid for one in decisions.grants] == ["new"]
    assert [one.uid for one in decisions.preemptions] == ["old"]
    check(state, decisions)


@settings(max_examples=200, deadline=None)
@given(states())
def test_invariants_of_decisions(state):
    check(state, admit(state, NOW))


@settings(max_examples=100, deadline=None)
@given(states(), st.randoms(use_true_random=False))
def test_the_order_of_objects_and_a_restart_change_nothing(state, rng):
    def shuffled(items):
        return tuple(rng.sample(items, len(items)))

    other = ClusterState(
        nodes=None if state.nodes is None else shuffled(state.nodes),
        queues=shuffled(state.queues),
        workloads=shuffled(state.workloads),
    )
    other = msgspec.json.decode(msgspec.json.encode(other), type=ClusterState)
    assert admit(other, NOW) == admit(state, NOW)


def test_jobs_without_any_requests_fit_everywhere():
    state = ClusterState(
        nodes=(node("n0"),), queues=(queue("q"),), workloads=(replace(request("a", "q"), pod={}),)
    )
    assert [one.uid for one in admit(state, NOW).grants] == ["a"]
