"""Admitted jobs that request another size, and gangs that have lost a node."""

from queueing import admitted, admitted_workload, decide, nodes, queue, request


def grows(name="g", to=4, **fields):
    return admitted_workload(name, "a", to, admitted=2, **fields)


def test_a_job_grows_if_nodes_are_free():
    (admit,) = decide(nodes(4), [queue("a")], grows()).grants
    assert (admit.uid, admit.nodes) == ("g", 4)
    assert sum(admit.placement.values()) == 2


def test_waiting_jobs_come_before_growth():
    decisions = decide(nodes(4), [queue("a")], grows(), request("j", "a", 2))
    assert admitted(decisions) == ["j"]
    assert decisions.pending["g"].position == 0
    assert decisions.pending["g"].message == (
        "The job needs 16 GPUs on 2 nodes more. Machines that are ready have room for 0 of 2 pods."
    )


def test_reserved_nodes_are_not_used_for_growth():
    decisions = decide(nodes(4), [queue("a")], grows(), request("j", "a", 3))
    assert admitted(decisions) == []
    assert decisions.pending["g"].reason == "WaitingForTurn"
    assert decisions.pending["g"].message.endswith("Other waiting jobs come first.")


def test_quota_bounds_growth():
    decisions = decide(
        nodes(9), [queue("a", quota={"gpus": 32})], grows(), admitted_workload("o", "a")
    )
    assert decisions.pending["g"].message == (
        "The job needs 16 GPUs on 2 nodes more. The quota of queue a has 8 GPUs of 32 GPUs left."
    )


def test_growth_does_not_count_as_a_job():
    assert admitted(decide(nodes(9), [queue("a", quota={"jobs": 1})], grows())) == ["g"]


def test_growth_beyond_all_nodes_is_reported():
    status = decide(nodes(3), [queue("a")], grows(to=5)).pending["g"]
    assert status.reason == "ExceedsNodes"
    assert "Machines that are ready have room for 3 of 5 pods." in status.message


def test_a_preempted_job_does_not_grow():
    decisions = decide(nodes(9), [queue("a")], grows(preempted_for="x"))
    assert decisions.grants == ()
    assert decisions.pending == {}


def test_a_smaller_size_is_granted_at_once():
    (admit,) = decide(nodes(2), [queue("a", 0)], admitted_workload("s", "a", 1, admitted=2)).grants
    assert (admit.uid, admit.nodes, admit.placement) == ("s", 1, {})


def test_a_gang_that_lost_a_node_keeps_its_reservation():
    # One of two pods has no node. It gets the next free one, before any waiting job.
    gang = admitted_workload("g", "a", 2, pods_by_node={"n000": 1})
    decisions = decide(nodes(2), [queue("a")], gang, request("j", "a"))
    assert admitted(decisions) == []
    # Without a free node, it has the first right to the next one that is freed.
    other = admitted_workload("o", "a", pods_by_node={"n001": 1})
    decisions = decide(nodes(3), [queue("a")], gang, other, request("j", "a"), request("k", "a"))
    assert admitted(decisions) == []
    gang = admitted_workload("g", "a", 3, pods_by_node={"n000": 1})
    decisions = decide(nodes(3), [queue("a")], gang, other, request("j", "a", 1, 4))
    assert admitted(decisions) == []
    # No node is free.
    gang = admitted_workload("g", "a", 2, pods_by_node={"n000": 1})
    decisions = decide(nodes(2), [queue("a")], gang, other, request("j", "a"))
    assert admitted(decisions) == []
