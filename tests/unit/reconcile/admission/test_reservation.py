"""Reservations of heads, and the jobs that may run before them."""

import pytest

from queueing import admitted, admitted_workload, decide, node, nodes, queue, request

HOUR = 3600.0


def test_only_jobs_that_end_in_time_pass_a_reservation():
    running = admitted_workload("r", "a", 2, seconds_left=HOUR)
    asked = [
        request("head", "a", 4, age=9),
        request("long", "a", 1, age=8, seconds_left=HOUR + 1),
        request("endless", "a", 1, age=7),
        request("short", "a", 1, age=6, seconds_left=HOUR),
    ]
    decisions = decide(nodes(4), [queue("a")], running, *asked)
    assert admitted(decisions) == ["short"]
    assert decisions.pending["head"].message == (
        "The job needs 32 GPUs on 4 nodes. Machines that are ready have room for 1 of 4 pods."
        " It starts by 2026-01-01T01:00Z at the latest."
    )
    assert decisions.pending["long"].message == "Waiting behind other jobs in queue a."


def test_nodes_beyond_the_reservation_are_used_for_any_time():
    running = admitted_workload("r", "a", 3, seconds_left=HOUR)
    asked = [request("head", "a", 3, age=9), request("x", "a", age=8), request("y", "a", age=7)]
    decisions = decide(nodes(5), [queue("a")], running, *asked)
    assert admitted(decisions) == ["x", "y"]


def test_nodes_beyond_the_reservation_are_used_once():
    running = admitted_workload("r", "a", 3, seconds_left=HOUR)
    asked = [request("head", "a", 4, age=9), *(request(f"x{i}", "a", age=8 - i) for i in range(3))]
    assert admitted(decide(nodes(6), [queue("a")], running, *asked)) == ["x0", "x1"]
    # The head needs a part of a node that is completely free now.
    running = admitted_workload("r", "a", 1, pods_by_node={"n000": 1}, seconds_left=HOUR)
    asked = [request("head", "a", 3, 4, age=9)]
    asked += [request(f"x{i}", "a", 1, 4, age=8 - i) for i in range(2)]
    assert admitted(decide(nodes(2), [queue("a")], running, *asked)) == ["x0"]


def test_without_a_deadline_only_unreserved_nodes_are_used():
    running = [
        admitted_workload("old", "a", 2, admitted_for=100),
        admitted_workload("young", "a", 1, admitted_for=1),
    ]
    asked = [
        request("head", "a", 4, age=9),
        request("short", "a", 1, age=8, seconds_left=1),
        request("tiny", "a", 1, 4, age=7),
    ]
    machines = (*nodes(5), node("small", 4))
    decisions = decide(machines, [queue("a")], *running, *asked)
    assert admitted(decisions) == ["tiny"]
    assert decisions.pending["head"].message.endswith(
        "Machines that are ready have room for 2 of 4 pods."
    )


def test_a_reservation_holds_against_all_queues():
    queues = [queue("a", 9), queue("b", 1)]
    running = admitted_workload("r", "b", 2, seconds_left=HOUR)
    asked = [
        request("head", "a", 4),
        request("b-long", "b", 1, age=8),
        request("b-short", "b", 1, age=7, seconds_left=60),
    ]
    decisions = decide(nodes(4), queues, running, *asked)
    assert admitted(decisions) == ["b-short"]
    assert decisions.pending["b-long"].reason == "WaitingForTurn"
    assert decisions.pending["b-long"].message == (
        "The job needs 8 GPUs on 1 node. The machines are reserved for head in queue a."
    )


def test_a_reservation_holds_against_jobs_that_select_more_nodes():
    machines = tuple(node(f"x{i}", labels={"zone": "x"}) for i in range(2))
    running = admitted_workload("r", "d", pods_by_node={"x0": 1}, seconds_left=HOUR)
    asked = [request("ax", "a", 2, node_selector={"zone": "x"}), request("any", "b")]
    decisions = decide(machines, [queue("a", 9), queue("b"), queue("d")], running, *asked)
    assert admitted(decisions) == []
    assert decisions.pending["any"].reason == "WaitingForTurn"


def test_a_preemption_frees_nodes_that_a_reservation_needed():
    """The head of a reserves a part of x0, which a preempted job of two pods leaves as well."""
    machines = (
        node("x0", labels={"zone": "x"}),
        node("x1", 4, labels={"zone": "x"}),
        node("y0", labels={"zone": "y"}),
    )
    running = [
        admitted_workload("preempted", "d", 2, 4, pods_by_node={"x0": 1, "y0": 1}),
        admitted_workload("ends", "e", 1, 4, pods_by_node={"x1": 1}, seconds_left=HOUR),
        admitted_workload("stays", "e", 1, 4, pods_by_node={"y0": 1}),
    ]
    asked = [
        request("ax", "a", 2, 4, node_selector={"zone": "x"}),
        request("urgent", "d", 1, 4, priority=1, node_selector={"zone": "y"}),
        *(request(f"c{i}", "c", 1, 4, age=9 - i, node_selector={"zone": "x"}) for i in range(2)),
    ]
    queues = [queue("a", 9), queue("c"), queue("d", 3), queue("e")]
    decisions = decide(machines, queues, *running, *asked)
    assert [one.uid for one in decisions.preemptions] == ["preempted"]
    assert admitted(decisions) == ["c0"]
    assert "starts by 2026-01-01T01:00Z" in decisions.pending["ax"].message


def test_the_nodes_of_a_preemption_stay_out_of_a_reservation():
    """The head of a gets the free part of x0, and the urgent job the part of the preempted one."""
    machines = (
        node("x0", 12, labels={"zone": "x", "large": "yes"}),
        node("x1", 8, labels={"zone": "x"}),
    )
    running = [
        admitted_workload("preempted", "d", 1, 4, pods_by_node={"x0": 1}),
        admitted_workload("ends", "e", pods_by_node={"x1": 1}, seconds_left=HOUR),
    ]
    asked = [
        request("ax", "a", 2, node_selector={"zone": "x"}),
        request("urgent", "d", 1, 4, age=9, priority=1, node_selector={"large": "yes"}),
        request("next", "d", 1, 4, age=8, priority=1, node_selector={"large": "yes"}),
        request("c0", "c", 1, 4, node_selector={"zone": "x"}),
    ]
    queues = [queue("a", 9), queue("c"), queue("d", 3), queue("e")]
    decisions = decide(machines, queues, *running, *asked)
    assert [one.uid for one in decisions.preemptions] == ["preempted"]
    assert [uid for uid, status in decisions.pending.items() if status.nominated] == ["urgent"]
    assert admitted(decisions) == []


def test_separate_nodes_have_separate_reservations():
    machines = tuple(node(f"{zone}{i}", labels={"zone": zone}) for zone in "xy" for i in range(2))
    queues = [queue("a", 5), queue("b"), queue("d")]
    running = [
        admitted_workload("rx", "d", pods_by_node={"x0": 1}, seconds_left=HOUR),
        admitted_workload("ry", "d", pods_by_node={"y0": 1}, seconds_left=2 * HOUR),
    ]
    asked = [
        request("ax", "a", 2, node_selector={"zone": "x"}),
        request("by", "b", 2, node_selector={"zone": "y"}),
        request("dx", "d", 1, age=8, node_selector={"zone": "x"}, seconds_left=HOUR + 1),
        request("dy", "d", 1, age=7, node_selector={"zone": "y"}, seconds_left=HOUR + 1),
    ]
    decisions = decide(machines, queues, *running, *asked)
    assert admitted(decisions) == ["dy"]
    assert "starts by 2026-01-01T01:00Z" in decisions.pending["ax"].message
    assert "starts by 2026-01-01T02:00Z" in decisions.pending["by"].message


def test_queues_on_other_nodes_are_served_meanwhile():
    machines = tuple(node(f"{zone}{i}", labels={"zone": zone}) for zone in "xy" for i in range(2))
    asked = [request("ax", "a", 2, node_selector={"zone": "x"})]
    asked += [request(f"b{i}", "b", node_selector={"zone": "y"}) for i in range(2)]
    running = admitted_workload("r", "b", pods_by_node={"x0": 1})
    decisions = decide(machines, [queue("a", 9), queue("b")], running, *asked)
    assert admitted(decisions) == ["b0", "b1"]
    # Nodes that a cannot use do not count for its share.
    assert decisions.queues[0].round_robin.current == 0


def test_a_later_reservation_waits_for_backfilled_jobs():
    machines = tuple(node(f"{zone}{i}", labels={"zone": zone}) for zone in "xy" for i in range(2))
    running = admitted_workload("r", "b", pods_by_node={"x0": 1})
    asked = [
        request("ax", "a", 2, node_selector={"zone": "x"}),
        *(request(f"b{i}", "b", age=9 - i, node_selector={"zone": "y"}) for i in range(3)),
    ]
    decisions = decide(machines, [queue("a", 9), queue("b")], running, *asked)
    assert admitted(decisions) == ["b0", "b1"]
    assert decisions.pending["b2"].reason == "WaitingForNodes"


def test_a_job_that_passes_one_reservation_delays_another():
    """It could use the nodes of both, and runs on those of the second."""
    machines = (node("x0", labels={"zone": "x"}), node("y0", labels={"zone": "y"}))
    running = admitted_workload("r", "d", gpus=4, pods_by_node={"x0": 1}, seconds_left=HOUR)
    asked = [
        request("ax", "a", node_selector={"zone": "x"}),
        request("any", "b", seconds_left=60),
        request("cx", "c", gpus=4, age=9, node_selector={"zone": "x"}, seconds_left=60),
        request("cy", "c", age=8, node_selector={"zone": "y"}),
    ]
    queues = [queue("a", 9), queue("b", 3), queue("c"), queue("d")]
    decisions = decide(machines, queues, running, *asked)
    assert admitted(decisions) == ["any", "cx"]
    assert "starts by 2026-01-01T00:01Z" in decisions.pending["cy"].message


def test_jobs_pass_a_head_that_lacks_quota():
    """It has no reservation: nobody knows which jobs of its users end first."""
    running = admitted_workload("r", "a", 2, seconds_left=HOUR)
    asked = [request("head", "a", 3, age=9), request("long", "a", 1, age=8)]
    decisions = decide(nodes(9), [queue("a", quota={"gpus": 24})], running, *asked)
    assert admitted(decisions) == ["long"]
    assert decisions.pending["head"].message.endswith(
        "The quota of queue a has 0 GPUs of 24 GPUs left."
    )


def test_borrowed_quota_without_a_deadline_is_waited_for():
    queues = [queue(name, quota={"gpus": 16}, cohort="c") for name in "ab"]
    queues.append(queue("lent", quota={"gpus": 8}, cohort="c"))
    running = [admitted_workload("a-1", "a", 2), admitted_workload("b-1", "b", 2)]
    asked = [request("head", "a", 2, age=9), request("next", "a", 1, 4, age=8)]
    decisions = decide(nodes(9), queues, *running, *asked)
    assert admitted(decisions) == ["next"]
    assert decisions.pending["head"].message.endswith(
        "The quota of cohort c has 4 GPUs of 40 GPUs left."
    )


def test_a_reservation_avoids_nodes_reserved_for_others():
    # The nodes of the stopping job are reserved, so the head waits for the other job.
    running = [
        admitted_workload("stops", "a", 1, admitted_for=50, preempted_for="first"),
        admitted_workload("runs", "a", 1, admitted_for=10, seconds_left=HOUR),
    ]
    asked = [request("first", "a", 1, nominated=True), request("head", "b", 1)]
    decisions = decide(nodes(2), [queue("a"), queue("b")], *running, *asked)
    assert admitted(decisions) == []
    assert decisions.pending["first"].reason == "Preempting"
    assert "starts by 2026-01-01T01:00Z" in decisions.pending["head"].message


@pytest.mark.parametrize("known", [True, False])
def test_without_nodes_only_quota_decides(known):
    asked = [request("a-1", "a", 99, age=9), request("a-2", "a", 2)]
    decisions = decide(nodes(1) if known else None, [queue("a", quota={"gpus": 792})], *asked)
    assert admitted(decisions) == ([] if known else ["a-1"])
    assert decisions.pending["a-2"].reason == ("ExceedsNodes" if known else "InsufficientQuota")


def test_a_job_on_nodes_of_two_reservations_must_end_for_both():
    machines = tuple(node(name, labels={"zone": name[0]}) for name in ("x0", "y0", "y1"))
    both = admitted_workload("both", "d", 2, pods_by_node={"x0": 1, "y0": 1}, seconds_left=HOUR)
    asked = [
        request("ax", "a", node_selector={"zone": "x"}),
        request("by", "b", 2, node_selector={"zone": "y"}),
    ]
    # By weight, a is first.
    queues = [queue("a", 9), queue("b"), queue("d")]
    waits = decide(machines, queues, both, *asked).pending
    assert "starts by 2026-01-01T01:00Z" in waits["ax"].message
    assert "starts by 2026-01-01T01:00Z" in waits["by"].message
    other = admitted_workload("other", "d", pods_by_node={"y1": 1}, seconds_left=2 * HOUR)
    waits = decide(machines, queues, both, other, *asked).pending
    assert "starts by 2026-01-01T02:00Z" in waits["by"].message
    other = admitted_workload("other", "d", pods_by_node={"y1": 1}, seconds_left=60)
    waits = decide(machines, queues, both, other, *asked).pending
    assert "starts by 2026-01-01T01:00Z" in waits["by"].message
