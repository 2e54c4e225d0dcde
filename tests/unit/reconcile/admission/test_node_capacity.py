"""How pods are packed on nodes."""

import pytest
from msgspec.structs import replace

from queueing import GPU, admitted, admitted_workload, decide, node, nodes, queue, request
from torchrun_controller.reconcile.admission.model import ClusterState
from torchrun_controller.reconcile.admission.snapshot import Snapshot


def placement(machines, *requests):
    decisions = decide(machines, [queue("a")], *requests)
    return {one.uid: one.placement for one in decisions.grants}


def test_pods_share_nodes_and_the_fullest_node_comes_first():
    running = admitted_workload("r", "a", 1, 4, pods_by_node={"n001": 1})
    assert placement(nodes(3), running, request("j", "a", 3, 2)) == {"j": {"n001": 2, "n000": 1}}


def test_all_resources_count():
    machine = node("n0")
    machine = replace(machine, allocatable={**machine.allocatable, "rdma/hca": 1})
    pods = {GPU: 4, "cpu": 8000, "rdma/hca": 1}
    asked = [replace(request(f"j{i}", "a", 1, 4, age=9 - i), pod=pods) for i in range(2)]
    decisions = decide((machine,), [queue("a")], *asked)
    assert admitted(decisions) == ["j0"]
    assert "room for 0 of 1 pod." in decisions.pending["j1"].message


def test_a_missing_resource_never_fits():
    job = replace(request("j", "a"), pod={GPU: 8, "rdma/hca": 1})
    wait = decide(nodes(2), [queue("a")], job).pending["j"]
    assert (wait.reason, wait.position) == ("ExceedsNodes", 0)
    assert wait.message == (
        "The job needs 8 GPUs on 1 node. Machines that are ready have room for 0 of 1 pod. They do"
        " not fit even on empty machines. A pod requests 1 of rdma/hca; the largest machine offers 0."
        " Request smaller or fewer pods."
    )


@pytest.mark.parametrize(
    ("pod", "largest"),
    [
        ({GPU: 16}, "A pod requests 16 of nvidia.com/gpu; the largest machine offers 8."),
        ({"cpu": 10**9}, "A pod requests 1M of cpu; the largest machine offers "),
        ({"memory": 2**60}, "A pod requests 1Ei of memory; the largest machine offers "),
    ],
)
def test_a_pod_that_no_machine_has_room_for_is_told_of_the_largest(pod, largest):
    wait = decide(nodes(2), [queue("a")], replace(request("j", "a"), pod=pod)).pending["j"]
    assert wait.reason == "ExceedsNodes"
    assert largest.replace("1M", "1000000") in wait.message


def test_names_of_resources_that_no_machine_offers_are_no_work_for_each_machine():
    pod = {GPU: 1} | {f"x{number}.io/r": 1 for number in range(10_000)}
    state = ClusterState(
        nodes=nodes(50), queues=(queue("a"),), workloads=(replace(request("j", "a"), pod=pod),)
    )
    assert {len(free) for free in Snapshot(state).free.free} == {len(nodes(1)[0].allocatable) + 1}
    assert decide(nodes(50), [queue("a")], *state.workloads).pending["j"].reason == "ExceedsNodes"


def test_unusable_nodes_and_those_that_do_not_match_take_nothing():
    machines = (
        node("n0", usable=False, labels={"zone": "x"}),
        node("n1", labels={"zone": "y"}),
        node("n2", labels={"zone": "x", "gpu": "h100"}),
    )
    job = request("j", "a", node_selector={"zone": "x"})
    assert placement(machines, job) == {"j": {"n2": 1}}
    two = request("j", "a", 2, node_selector={"zone": "x"})
    wait = decide(machines, [queue("a")], two).pending["j"]
    assert "Machines with zone=x have room for 1 of 2 pods." in wait.message


def test_pods_on_deleted_or_unusable_nodes_use_no_other_nodes():
    running = admitted_workload("r", "a", 2, pods_by_node={"gone": 1, "n0": 1})
    machines = (node("n0", usable=False), node("n1"))
    assert placement(machines, running, request("j", "a")) == {"j": {"n1": 1}}


def test_admitted_pods_are_placed_by_the_age_of_their_admission():
    machines = (node("n0", 4), node("n1", 8), node("n2", 16))
    running = [
        admitted_workload("young", "a", 1, 8, admitted_for=10),
        admitted_workload("old", "a", 2, 4, admitted_for=20),
    ]
    # The old job gets n0 and half of n1, so the young one gets half of n2.
    for order in (running, running[::-1]):
        found = placement(machines, *order, request("j", "a", 1, 8))
        assert found == {"j": {"n2": 1}}
        found = placement(machines, *order, request("j", "a", 3, 4))
        assert found == {"j": {"n1": 1, "n2": 2}}


def test_an_admitted_job_occupies_only_the_nodes_of_its_pods():
    workloads = (
        admitted_workload("placed", "a", 1, 4, pods_by_node={"n001": 1}, admitted_for=20),
        admitted_workload("unplaced", "a", 1, 4, admitted_for=10),
    )
    state = ClusterState(nodes=nodes(3), queues=(queue("a"),), workloads=workloads)
    assert [one.placement for one in Snapshot(state).admitted] == [{1: 1}, {1: 1}]


def test_admitted_pods_without_room_wait_on_the_largest_node():
    machines = (node("n0", 8), node("n1", 4))
    running = [
        admitted_workload("r", "a", 1, 4, pods_by_node={"n0": 1}, admitted_for=20),
        admitted_workload("late", "a", 1, 8, admitted_for=10),
    ]
    asked = [request(f"j{i}", "a", 1, 4, age=9 - i) for i in range(2)]
    assert placement(machines, *running, *asked) == {"j0": {"n1": 1}}


def test_jobs_without_gpus_say_how_many_pods_fit():
    machine = replace(node("n0"), allocatable={"cpu": 1000})
    running = admitted_workload("r", "b", 1, 0, pods_by_node={"n0": 1})
    wait = decide((machine,), [queue("a")], running, request("j", "a", 1, 0)).pending["j"]
    assert wait.message == "The job needs 1 node. Machines that are ready have room for 0 of 1 pod."


def test_the_order_of_requests_has_no_effect():
    asked = [
        replace(request("j0", "a"), pod={GPU: 8, "cpu": 1000}),
        replace(request("j1", "a"), pod={"cpu": 1000, GPU: 8}),
    ]
    assert admitted(decide(nodes(2), [queue("a")], *asked)) == ["j0", "j1"]


def test_a_job_waits_for_nodes_that_are_not_ready():
    ready, lost = node("n000"), tuple(node(f"n00{i}", usable=False) for i in (1, 2))
    asked = [request("wide", "a", 3, age=9), request("next", "a", 1, age=1)]
    decisions = decide((ready, *lost), [queue("a")], *asked)
    wait = decisions.pending["wide"]
    assert (wait.reason, wait.position) == ("WaitingForNodes", 1)
    assert wait.message == (
        "The job needs 24 GPUs on 3 nodes. Machines that are ready have room for 1 of 3 pods. The job"
        " waits for other machines, which are not ready or cordoned; see kubectl get nodes."
    )
    assert admitted(decisions) == ["next"], "it delays no other"
    assert admitted(decide((ready, *(replace(n, usable=True) for n in lost)), [queue("a")], *asked))


def test_a_job_that_exceeds_all_nodes_does_not_wait_for_those_that_are_not_ready():
    machines = (node("n000"), node("n001", usable=False))
    wait = decide(machines, [queue("a")], request("wide", "a", 3)).pending["wide"]
    assert (wait.reason, wait.position) == ("ExceedsNodes", 0)
    machines = (node("n000"), node("n001", usable=False, labels={"zone": "y"}))
    for zone, reason in (("y", "WaitingForNodes"), ("x", "ExceedsNodes")):
        job = request("j", "a", node_selector={"zone": zone})
        assert decide(machines, [queue("a")], job).pending["j"].reason == reason


def test_a_job_that_grows_waits_for_nodes_that_are_not_ready():
    machines = (node("n000"), node("n001", usable=False))
    grows = replace(admitted_workload("g", "a", pods_by_node={"n000": 1}), nodes=2)
    status = decide(machines, [queue("a")], grows).pending["g"]
    assert status.reason == "WaitingForNodes"
    assert "Machines that are ready have room for 1 of 2 pods." in status.message


@pytest.mark.parametrize(
    ("machines", "share"),
    [
        ((node("n000", labels={"zone": "y"}),), False),
        ((node("n000", usable=False),), False),
        (None, True),
    ],
    ids=["apart", "unusable", "unknown"],
)
def test_jobs_compete_for_nodes_that_both_may_use(machines, share):
    snapshot = Snapshot(ClusterState(nodes=machines, workloads=(request("j", "a"),)))
    x, y = (snapshot.nodes.shape(request("j", "a", node_selector={"zone": zone})) for zone in "xy")
    assert snapshot.overlap(x, x)
    assert snapshot.overlap(x, y) is share
