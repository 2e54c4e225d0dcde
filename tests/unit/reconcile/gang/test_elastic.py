"""Elastic jobs: they shrink when nodes are missing, and grow when nodes return."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import Job
from torchrun_api.kinds import JOBS, PODS
from torchrun_controller.reconcile import Conflict, Plan, Rejection, reconcile
from torchrun_controller.reconcile.gang.elastic import SETTLE, SHRINK_AFTER
from torchrun_controller.reconcile.gang.gate import REPEAT_SECONDS
from torchrun_controller.reconcile.model.observed import RefusedWrites
from world import DEFAULTS, START, World, make_job, make_queue

GROW_AFTER = DEFAULTS.grow_after
FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
QUEUE = {"nodeResources": {"gpus": 8, "cpus": 4, "memory": "16Gi"}}


def elastic(nodes: int = 3, fewest: int = 1, most: int = 4, **spec: object) -> World:
    bounds = {"minNodes": fewest, "maxNodes": most}
    world = World(make_job(numNodes=nodes, elastic=bounds, **spec), make_queue(**QUEUE))
    world.settle()
    return world


def place(world: World, count: int) -> None:
    """Schedule the first workers, but not the others."""
    for index, pod in enumerate(world.workers()):
        if index < count:
            world.placed(pod.metadata.name)
        else:
            world.not_placed(FULL, index)
    world.settle()


def shrunk(**spec: object) -> World:
    """A running gang of 2 of 3 nodes."""
    return shrink(elastic(**spec))


def shrink(world: World) -> World:
    """The gang finds two nodes only, and goes on with these."""
    place(world, 2)
    world.pass_time(seconds=SHRINK_AFTER.total_seconds())
    world.settle()
    world.containers_stop()
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert (world.phase, world.job.status.num_nodes) == ("Running", 2)
    return world


def suspend_for_an_hour(world: World) -> Job:
    """Another controller suspends the child Job. Returns the Job from before."""
    child: Job = world.objects[JOBS.plural, "train"]
    world.objects[JOBS.plural, "train"] = replace(child, spec=replace(child.spec, suspend=True))
    world.settle()
    world.pass_time(hours=1)
    world.settle()
    return child


def grow_time(world: World) -> Plan:
    """The gang is old enough to be replaced by a larger one."""
    world.pass_time(seconds=GROW_AFTER.total_seconds())
    return world.settle()


def probes(world: World) -> list[str]:
    return sorted(pod.metadata.name for pod in world.observed().gang.probes)


def probe_placed(world: World, index: int) -> None:
    world.placed(f"train-probe-{index}")


def test_a_gang_of_full_size_has_no_probes():
    world = elastic()
    place(world, 3)
    world.all_workers("Running")
    world.settle()
    assert world.condition("FullSize").status == "True"
    assert world.job.status.reason == "WorkersRunning"
    grow_time(world)
    assert probes(world) == []


def test_a_gang_without_enough_nodes_shrinks_after_a_delay():
    world = elastic()
    place(world, 2)
    plan = world.plan()
    assert plan.requeue_after == SHRINK_AFTER.total_seconds()
    assert world.job.status.reason == "Unschedulable"
    message = "The gang shrinks to 2 nodes unless all 3 pods are scheduled by 03:04:35 UTC."
    assert message in world.job.status.message
    assert world.condition("FullSize").message == message
    world.pass_time(seconds=29)
    assert world.plan().applies == ()
    world.pass_time(seconds=1)
    plan = world.step()
    assert [(a.kind, a.name) for a in plan.applies] == [(JOBS, "train-r1")]
    assert [event.reason for event in plan.events] == ["Shrinking"]
    assert "After 30 s, 2 of 3 pods are scheduled." in world.job.status.message
    status = world.job.status
    assert (status.num_nodes, status.attempt, status.restarts, status.disruptions) == (2, 1, 0, 0)
    assert [(a.number, a.counted, a.reason) for a in status.attempts] == [(0, False, "Shrinking")]
    assert (JOBS.plural, "train") not in world.objects, "the larger gang is deleted"
    world.settle()
    assert world.job.status.reason == "WaitingForOldGang"


def test_a_new_gang_does_not_shrink():
    world = World(make_job(numNodes=3, elastic={"minNodes": 2, "maxNodes": 3}), make_queue())
    world.step()
    assert world.job.status.message == "0 of 3 pods are running."
    assert world.step().status is None
    assert all(c.type != "FullSize" for c in world.job.status.conditions)


def test_a_shrunk_gang_reports_that_it_waits_for_capacity():
    world = shrunk()
    assert world.job.status.reason == "WaitingForCapacity"
    assert world.job.status.message.startswith(
        "The gang has 2 of 3 nodes. Waiting for capacity. Probes for more nodes start at"
    )
    condition = world.condition("FullSize")
    assert (condition.status, condition.reason) == ("False", "WaitingForCapacity")
    assert condition.message == world.job.status.message
    assert world.condition("Running").message.endswith("See the condition FullSize.")
    assert world.job.status.workers_status == "0/2 ready"


def test_below_min_nodes_the_gang_waits():
    world = elastic(fewest=2)
    place(world, 1)
    size = "The gang needs at least 2 nodes (elastic.minNodes)."
    assert world.job.status.message.endswith(size)
    assert world.condition("FullSize").message == size
    assert size not in world.condition("Scheduled").message
    assert world.condition("Running").message.endswith("See the condition Scheduled.")
    world.pass_time(hours=9)
    assert world.plan().applies == ()


def test_a_gang_waits_for_nodes_of_the_old_gang():
    world = elastic()
    place(world, 3)
    world.all_workers("Running")
    world.settle()
    world.pod("train-1-abcde", phase="Failed")
    world.settle()
    place(world, 1)
    assert world.condition("FullSize").status == "Unknown"
    world.pass_time(seconds=600)
    world.settle()
    assert world.job.status.attempt == 1, "the nodes are not free yet"
    world.containers_stop()
    left = world.settle_twice().requeue_after
    assert left == SHRINK_AFTER.total_seconds() - REPEAT_SECONDS, "counted from when they are free"
    world.pass_time(seconds=left)
    world.settle()
    assert (world.job.status.attempt, world.job.status.num_nodes) == (2, 1)


def test_a_shrunk_gang_can_shrink_again():
    world = shrunk()
    world.pass_time(seconds=60)
    world.pod("train-r1-0-abcde", phase="Failed")
    world.settle()
    assert (world.job.status.num_nodes, world.job.status.restarts) == (2, 1), "it keeps its size"
    world.containers_stop()
    place(world, 1)
    world.pass_time(seconds=30)
    world.settle()
    assert world.job.status.num_nodes == 1


def test_a_gang_held_by_another_controller_does_not_shrink():
    world = elastic()
    suspend_for_an_hour(world)
    assert world.job.status.attempt == 0
    assert all(c.type != "FullSize" for c in world.job.status.conditions)


def test_an_old_enough_gang_has_probes_for_missing_nodes():
    world = shrunk()
    left = world.settle_twice().requeue_after
    assert left == GROW_AFTER.total_seconds() - REPEAT_SECONDS
    assert probes(world) == []
    grow_time(world)
    assert probes(world) == ["train-probe-0"]
    assert "Probe pods request 1 more node." in world.job.status.message
    assert world.job.status.workers.pending == 0, "a probe is no worker"
    assert world.phase == "Running"


def test_a_scheduled_probe_grows_the_gang():
    world = shrunk()
    grow_time(world)
    probe_placed(world, 0)
    plan = world.step()
    assert [(a.kind, a.name) for a in plan.applies] == [(JOBS, "train-r2")]
    assert [event.reason for event in plan.events] == ["Growing"]
    assert {(d.kind.plural, d.name) for d in plan.deletes} == {
        (JOBS.plural, "train-r1"),
        (PODS.plural, "train-probe-0"),
    }
    assert all(d.grace_seconds is None for d in plan.deletes), "time for a last checkpoint"
    world.containers_stop()
    world.settle()
    world.all_workers("Running")
    world.settle()
    status = world.job.status
    assert (status.num_nodes, status.restarts, status.disruptions) == (3, 0, 0)
    assert (status.reason, world.condition("FullSize").status) == ("WorkersRunning", "True")


def one_of_three_with_probes() -> World:
    """A gang of 1 runs where 3 were requested, and probes look for room for the other two."""
    world = elastic()
    place(world, 1)
    world.pass_time(seconds=30)
    world.settle()
    world.containers_stop()
    world.all_workers("Running")
    world.settle()
    grow_time(world)
    return world


def test_probes_that_are_scheduled_together_grow_the_gang_once():
    world = one_of_three_with_probes()
    assert probes(world) == ["train-probe-0", "train-probe-1"]
    probe_placed(world, 1)
    assert world.settle().requeue_after == SETTLE.total_seconds()
    world.pass_time(seconds=4)
    probe_placed(world, 0)
    world.step()
    assert world.job.status.num_nodes == 3


def test_a_probe_that_was_scheduled_for_long_grows_the_gang_alone():
    world = one_of_three_with_probes()
    probe_placed(world, 1)
    world.settle()
    world.pass_time(seconds=SETTLE.total_seconds())
    world.settle()
    assert world.job.status.num_nodes == 2
    assert probes(world) == []


def test_a_probe_looks_like_a_worker_to_the_scheduler_only():
    world = shrunk(
        scheduling={
            "nodeSelector": {"pool": "a"},
            "priorityClassName": "high",
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
        labels={"team": "vision"},
        volumes={"checkpoints": {"claimName": "shared"}},
    )
    world.settle_twice()
    world.pass_time(seconds=GROW_AFTER.total_seconds())
    (probe,) = (apply.body for apply in world.plan().applies)
    spec, meta = probe["spec"], probe["metadata"]
    assert spec["nodeSelector"] == {"pool": "a"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert "priorityClassName" not in spec, "a probe preempts no pod"
    assert [v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"]] == ["shared"]
    (container,) = spec["containers"]
    assert container["resources"]["requests"]["nvidia.com/gpu"] == "8"
    assert container["image"] == DEFAULTS.runtime_image
    assert container["command"] == ["sleep", "infinity"]
    assert container["securityContext"]["runAsNonRoot"] is True
    assert meta["labels"]["team"] == "vision"
    assert meta["labels"][names.COMPONENT_LABEL] == names.PROBE
    assert names.ATTEMPT_LABEL not in meta["labels"]
    assert meta["ownerReferences"][0]["uid"] == "uid-train"


@pytest.mark.parametrize("happens", ["suspend", "succeeds", "fails", "scales", "job deleted"])
def test_probes_are_deleted_with_their_purpose(happens):
    world = shrunk()
    grow_time(world)
    match happens:
        case "suspend":
            world.spec(suspend=True)
        case "succeeds":
            world.job_condition("Complete")
        case "fails":
            world.pod("train-r1-0-abcde", phase="Failed")
        case "scales":
            world.spec(num_nodes=2)
        case _:
            world.delete_child_job()
    world.settle()
    assert probes(world) == []


def test_a_failed_probe_is_replaced():
    world = shrunk()
    grow_time(world)
    world.pod("train-probe-0", phase="Failed")
    world.step()
    assert probes(world) == []
    world.settle()
    assert probes(world) == ["train-probe-0"]
    assert world.job.status.num_nodes == 2


def test_a_refused_probe_is_reported_and_delays_nothing():
    world = shrunk()
    world.settle_twice()
    world.pass_time(seconds=GROW_AFTER.total_seconds())
    refused = Rejection("pods", "train-probe-0", "exceeded quota")
    plan = reconcile(
        replace(world.observed(), refused=RefusedWrites(rejections=(refused,))), world.now, DEFAULTS
    )
    assert plan.applies == ()
    assert "exceeded quota" in next(
        c.message for c in plan.status.conditions if c.type == "FullSize"
    )
    world.pod("train-r1-0-abcde", phase="Failed")
    plan = reconcile(
        replace(world.observed(), refused=RefusedWrites(rejections=(refused,))), world.now, DEFAULTS
    )
    assert [a.name for a in plan.applies] == ["train-r2"]


def test_no_probes_while_the_larger_gang_is_refused() -> None:
    world = shrunk()
    grow_time(world)
    probe_placed(world, 0)
    other = Rejection("services", "train", "denied too")
    world.rejections = (other, Rejection("jobs.batch", "train-r2", "denied by a policy"))
    for _ in range(3):
        world.step()
    assert probes(world) == []
    assert world.phase == "Running"
    assert world.condition("FullSize").message == (
        "The resize to 3 nodes is waiting. The API server refused jobs.batch train-r2: denied by a"
        " policy."
    )
    world.rejections = (other,)  # the gang has its Service
    world.settle()
    assert probes(world) == ["train-probe-0"]


def test_a_probe_name_of_another_owner_is_left_alone():
    world = shrunk()
    world.conflicts = (Conflict("pods", "train-probe-0", "somebody's"),)
    grow_time(world)
    assert probes(world) == []


@pytest.mark.parametrize("queue", [None, {"nodeResources": {"memory": "12Gigs"}}])
def test_no_probes_without_a_valid_queue(queue):
    world = shrunk()
    world.queue = None if queue is None else make_queue(**queue)
    grow_time(world)
    assert probes(world) == []
    message = "TorchrunQueue gpu does not exist" if queue is None else "12Gigs"
    assert message in world.condition("FullSize").message


def test_delays_count_from_the_creation_of_the_gang():
    world = elastic()
    assert world.observed().gang.child_jobs[-1].metadata.creation_timestamp == START
    assert timedelta(seconds=30) == SHRINK_AFTER
