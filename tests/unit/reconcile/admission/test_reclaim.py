"""A queue takes back the resources that it lends, and no others."""

from msgspec.structs import replace

from queueing import GPU, admitted_workload, decide, node, nodes, queue, request


def preempted(decisions):
    return [one.uid for one in decisions.preemptions]


def of_cohort(name, **quota):
    return queue(name, quota=quota, cohort="x")


# Queue c lends a job to b, which uses its own 8 GPUs.
B = [
    admitted_workload("b-1", "b", 1, 4, admitted_for=90, pods_by_node={"n002": 1}),
    admitted_workload("b-2", "b", 1, 4, admitted_for=80, pods_by_node={"n002": 1}),
]
# Queue d borrows 4 GPUs of a, and its job on them is the oldest.
D = [
    admitted_workload("d-1", "d", 1, 4, admitted_for=300, pods_by_node={"n000": 1}),
    admitted_workload("d-2", "d", 1, 8, admitted_for=200, pods_by_node={"n001": 1}),
]


def test_a_queue_reclaims_from_borrowers_of_what_it_lends():
    queues = [
        of_cohort("a", gpus=4),
        of_cohort("b", gpus=8, jobs=1),
        of_cohort("c", jobs=5),
        of_cohort("d", gpus=8),
    ]
    assert preempted(decide(nodes(4), queues, *B, *D, request("mine", "a", 1, 4))) == ["d-2"]
    # Queue a limits jobs, too. It does not lack them.
    queues[0] = of_cohort("a", gpus=4, jobs=1)
    assert preempted(decide(nodes(4), queues, *B, *D, request("mine", "a", 1, 4))) == ["d-2"]


def test_nodes_are_reclaimed_from_borrowers_of_what_the_head_requests():
    queues = [of_cohort("a", gpus=4), of_cohort("b", gpus=8, jobs=1), of_cohort("c", jobs=5)]
    machine = (node("n002"),)
    decisions = decide(machine, queues, *B, request("mine", "a", 1, 4))
    assert preempted(decisions) == []
    assert decisions.pending["mine"].reason == "WaitingForNodes"
    queues[0] = of_cohort("a", gpus=4, jobs=1)
    assert preempted(decide(machine, queues, *B, request("mine", "a", 1, 4))) == ["b-2"]


def test_a_queue_without_a_limit_reclaims_nothing():
    queues = [queue("a", cohort="x"), of_cohort("b", gpus=4), of_cohort("c", gpus=4)]
    assert preempted(decide((node("n002"),), queues, *B, request("mine", "a", 1, 4))) == []


def test_quota_is_reclaimed_before_nodes():
    """The head lacks GPUs, which d borrows, and a node. Queue b borrows CPUs, and is younger."""
    queues = [of_cohort("a", gpus=16, cpu=4000), of_cohort("b", cpu=1000), of_cohort("d", gpus=8)]
    borrower = admitted_workload("b-1", "b", 1, 0, admitted_for=90, pods_by_node={"n002": 1})
    running = [
        admitted_workload("d-1", "d", admitted_for=300, pods_by_node={"n000": 1}),
        admitted_workload("d-2", "d", admitted_for=200, pods_by_node={"n001": 1}),
        replace(borrower, pod={GPU: 8, "cpu": 2000}),
    ]
    mine = replace(request("mine", "a", 2), pod={GPU: 8, "cpu": 500})
    assert preempted(decide(nodes(4), queues, *running, mine)) == ["d-2"]
    assert preempted(decide(nodes(3), queues, *running, mine)) == ["d-2", "b-1"]


def test_a_queue_does_not_borrow_what_a_nominated_job_waits_for():
    """Queue b borrows 8 GPUs of a. Job next of queue a waits for them and 8 of its own."""
    queues = [of_cohort("a", gpus=24), of_cohort("b", gpus=16)]
    own = admitted_workload("own", "a", 2, pods_by_node={"n000": 1, "n001": 1})
    leaving = admitted_workload(
        "leaving",
        "b",
        3,
        pods_by_node={f"n00{number}": 1 for number in (2, 3, 4)},
        preempted_for="next",
    )
    following = request("next", "a", 2, priority=1, nominated=True)
    decisions = decide(nodes(5), queues, own, leaving, following, request("head", "b", 2))
    assert decisions.pending["next"].nominated
    assert preempted(decisions) == []
