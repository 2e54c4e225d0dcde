"""What pods use that run without their job, or on lost machines."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import JobStatus, NodeSpec, Taint
from torchrun_api.kinds.meta import Condition
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.pods.nodes import OUT_OF_SERVICE
from unit.cache.admission_caches import (
    ADMITTED_STATUS,
    GPU,
    NOW,
    World,
    a_gang,
    a_job,
    a_node,
    a_pod,
    a_queue,
    charged,
)


@pytest.fixture
def world() -> World:
    return World()


def test_pods_of_a_deleted_job_are_charged_until_they_end(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(**ADMITTED_STATUS))
    world.change(charged(a_gang()))
    world.change(charged(a_pod(0)))
    (request,) = world.seen().state.workloads
    assert (request.uid, request.is_deleted) == ("uid-run", False)
    world.change(a_job(**ADMITTED_STATUS), gone=True)
    world.change(charged(a_gang()), gone=True)
    (request,) = world.seen().state.workloads
    assert (request.name, request.admitted, request.gpus, request.is_deleted) == ("run", 1, 8, True)
    other = a_job(version=9)  # a waiting job with the same name
    world.change(replace(other, metadata=replace(other.metadata, uid="uid-other")))
    assert [r.admitted for r in world.seen().state.workloads] == [1, 0]
    world.change(charged(a_pod(0)), gone=True)
    (request,) = world.seen().state.workloads
    assert request.admitted == 0


def used_nodes(world: World) -> dict[str, int]:
    """The nodes that each queue with admission is charged with."""
    return {queue.name: queue.used.nodes for queue in admit(world.seen().state, NOW).queues}


def test_pods_of_a_deleted_job_are_charged_once_their_queue_gets_a_quota(world: World) -> None:
    """Before that, they only use room on the nodes."""
    world.change(a_queue("other", quota={"nodes": 9}))
    world.change(a_queue())
    world.change(a_job(phase="Running"))
    for child in (a_gang(), a_pod(0), a_pod(1)):
        world.change(charged(child))
    assert world.awake()
    (running,) = world.seen().state.workloads
    world.change(a_job(phase="Running"), gone=True)
    assert world.awake()
    seen = world.seen().state
    (workload,) = seen.workloads
    assert (workload.admitted, workload.is_deleted) == (2, True)
    assert workload.pods_by_node == running.pods_by_node == {"n": 2}
    assert used_nodes(world) == {"other": 0}
    world.change(a_queue(generation=2, quota={"nodes": 3}))
    assert used_nodes(world) == {"lab": 2, "other": 0}


def test_a_restarted_controller_charges_pods_of_deleted_jobs(world: World) -> None:
    """The new process never saw the job."""
    world.change(a_queue(quota={"nodes": 4}))
    world.change(charged(a_pod(1)))
    (request,) = world.seen().state.workloads
    assert (request.queue, request.admitted, request.uid) == ("lab", 1, "uid-run/0")
    assert (request.pod, request.gpus) == ({"pods": 1, GPU: 8}, 8)
    assert request.pods_by_node == {"n": 1}


def test_forged_objects_take_no_room_but_what_the_scheduler_gave_them(world: World) -> None:
    """Any user who can create Jobs and pods in a namespace can write the labels."""
    world.change(a_queue(quota={"nodes": 4}))
    for name in ("n", "other"):
        world.change(a_node(name, pods="1", **{GPU: "8"}))
    world.change(a_job())
    gang = charged(a_gang("x"), "uid-x")
    world.change(replace(gang, spec=replace(gang.spec, parallelism=10**6, completions=10**6)))
    forged = charged(a_pod(node="", job="x"), "uid-x")
    world.change(forged)
    state = world.seen().state
    assert [workload.admitted for workload in state.workloads] == [0]
    assert [grant.uid for grant in admit(state, NOW).grants] == ["uid-run"]
    world.change(replace(forged, spec=replace(forged.spec, node_name="n")))
    assert admit(world.seen().state, NOW).grants == (), "it is on a node of the two"


def test_pods_of_a_deleted_job_do_not_belong_to_a_new_one_of_its_name(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    other = a_job(version=9, **ADMITTED_STATUS)
    world.change(replace(other, metadata=replace(other.metadata, uid="uid-other")))
    world.change(charged(a_pod(0, node="n")))
    state = world.seen().state
    assert {r.uid: r.pods_by_node for r in state.workloads} == {
        "uid-run/0": {"n": 1},
        "uid-other": {},
    }


def test_a_gang_without_running_pods_is_not_charged(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(charged(a_pod(0, phase="Succeeded")))
    assert world.seen().state.workloads == ()


@pytest.mark.parametrize("verdict", ["Failed", "FailureTarget"])
def test_pods_on_lost_nodes_do_not_block_admission(world: World, verdict: str) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_node(ready="Unknown"))
    world.change(a_job(**{**ADMITTED_STATUS, "phase": "Failed"}))
    ending = JobStatus(conditions=(Condition(type=verdict, status="True"),))
    world.change(replace(a_gang(), status=ending))
    world.change(a_pod(0))
    seen = world.seen()
    assert seen.next_lost_node == 35
    assert [r.admitted for r in seen.state.workloads] == [2]
    later = world.seen(NOW + timedelta(seconds=36))
    assert later.state.workloads == ()
    assert later.next_lost_node is None


@pytest.mark.parametrize("left", ["pods", "a finished job"])
def test_pods_are_charged_again_when_their_lost_node_is_back(world: World, left: str) -> None:
    """They run on until the taint manager deletes them, five minutes later."""
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_node())
    if left == "a finished job":
        world.change(a_job(phase="Failed", reason="WorkerFailed"))
    pod = a_pod(0) if left == "a finished job" else charged(a_pod(0))
    world.change(pod)
    (before,) = world.seen().state.workloads
    world.change(a_node(ready="Unknown"))
    assert world.seen(NOW + timedelta(seconds=60)).state.workloads == ()
    world.change(a_node())
    ready = (Condition(type="Ready", status="True"),)
    world.change(replace(pod, status=replace(pod.status, conditions=ready)))
    assert world.seen(NOW + timedelta(seconds=120)).state.workloads == (before,)


def test_pods_on_nodes_that_are_out_of_service_do_not_block_admission(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(**{**ADMITTED_STATUS, "phase": "Failed"}))
    world.change(a_pod(0))
    world.change(a_node())
    assert [r.admitted for r in world.seen().state.workloads] == [2]
    taint = Taint(key=OUT_OF_SERVICE, value="nodeshutdown", effect="NoExecute")
    world.change(replace(a_node(), spec=NodeSpec(taints=(taint,))))
    seen = world.seen()
    assert seen.state.workloads == ()
    assert seen.next_lost_node is None


@pytest.mark.parametrize(("name", "admitted"), [("run-0-bcdfg", [1]), ("run-0-debug", [])])
def test_only_orphaned_workers_of_a_deleted_job_are_charged(
    world: World, name: str, admitted: list[int]
) -> None:
    """A user's copy of a pod has its labels and annotations, and no owner either."""
    world.change(a_queue(quota={"nodes": 4}))
    world.change(charged(a_pod(0), name=name, owner_references=()))
    assert [workload.admitted for workload in world.seen().state.workloads] == admitted


def test_a_copy_does_not_keep_the_quota_of_a_finished_job(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(**ADMITTED_STATUS))
    copy = charged(a_pod(0), name="my-debug-copy", owner_references=())
    for child in (charged(a_gang()), charged(a_pod(0)), copy):
        world.change(child)
    assert [workload.pods_by_node for workload in world.seen().state.workloads] == [{"n": 1}]
    world.change(a_job(**{**ADMITTED_STATUS, "phase": "Succeeded"}))
    world.change(charged(a_gang()), gone=True)
    assert [workload.admitted for workload in world.seen().state.workloads] == [2]
    world.change(charged(a_pod(0)), gone=True)
    assert world.seen().state.workloads == ()


def test_a_pod_that_gets_another_owner_wakes_admission(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(**ADMITTED_STATUS))
    world.change(a_pod(0))
    assert world.awake()
    assert [workload.pods_by_node for workload in world.seen().state.workloads] == [{"n": 1}]
    world.change(replace(a_pod(0), metadata=replace(a_pod(0).metadata, owner_references=())))
    assert world.awake()
    assert [workload.pods_by_node for workload in world.seen().state.workloads] == [{}]
