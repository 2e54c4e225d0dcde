"""A gang on a machine that is about to leave stops as a whole, and starts elsewhere."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import Taint
from torchrun_api.kinds.resources import JOBS
from torchrun_controller.cache.node_view import node_facts
from torchrun_controller.reconcile.model.plan import Event
from torchrun_controller.reconcile.pods.nodes import LEAVING_TAINTS
from unit.reconcile.failing import fail
from unit.reconcile.gang.test_elastic import elastic
from world import World, make_job, make_queue

SPOT = "aws-node-termination-handler/spot-itn"


def placed(numNodes: int = 2, **spec: object) -> World:  # noqa: N803  # as in the YAML
    """A gang runs with one pod each on node-0, node-1 and so on."""
    world = World(make_job(numNodes=numNodes, **spec), make_queue())
    for index in range(numNodes + 1):
        world.node(f"node-{index}")
    world.settle()
    for index, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"node-{index}")
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    world.pass_time(seconds=100)
    return world


def taint(
    world: World, key: str, effect: str = "NoSchedule", *, cordoned: bool = False, node: int = 1
) -> None:
    """Something sets a taint on a machine, or cordons it, or both."""
    assert world.nodes is not None
    machine = world.nodes[f"node-{node}"]
    taints = (Taint(key=key, effect=effect),) if key else ()
    spec = replace(machine.spec, taints=taints, unschedulable=cordoned)
    world.nodes = world.nodes | {f"node-{node}": replace(machine, spec=spec)}


@pytest.mark.parametrize("key", sorted(LEAVING_TAINTS))
def test_the_gang_stops_with_its_grace_period_and_the_next_one_follows(key: str):
    world = placed()
    taint(world, key)
    plan = world.step()
    assert [(d.kind, d.name, d.grace_seconds) for d in plan.deletes] == [(JOBS, "train", None)]
    assert (JOBS, "train-r1") in [(apply.kind, apply.name) for apply in plan.applies]
    status = world.job.status
    assert (world.phase, status.reason, status.attempt) == ("Queued", "MachineLeaving", 1)
    assert (status.restarts, status.disruptions) == (0, 1)
    (end,) = status.attempts
    assert (end.reason, end.node, end.counted, end.running_seconds) == (
        *("MachineLeaving", "node-1", False),
        100,
    )
    message = (
        f"Machine node-1 is about to leave: {LEAVING_TAINTS[key]} has set the taint {key}. All"
        " ranks get SIGTERM to save a checkpoint, and the next gang starts on other machines. Not"
        " counted by maxRestarts."
    )
    assert plan.events == (Event("Normal", "MachineLeaving", message),)
    assert (status.message, end.message) == (message, message)
    world.settle()
    world.containers_stop()
    for index, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"node-{2 * index}")
    world.all_workers("Running")
    world.settle()
    assert (world.phase, world.job.status.disruptions) == ("Running", 1)


@pytest.mark.parametrize(
    ("key", "effect", "cordoned", "leaves"),
    [
        pytest.param("", "", True, False, id="a cordon alone"),
        pytest.param("node.kubernetes.io/unschedulable", "NoSchedule", True, False, id="cordon"),
        pytest.param("example.com/maintenance", "NoSchedule", True, False, id="another taint"),
        pytest.param("nvidia.com/gpu", "NoSchedule", False, False, id="a taint of GPUs"),
        pytest.param(SPOT, "PreferNoSchedule", False, False, id="it still takes pods"),
        pytest.param(SPOT, "PreferNoSchedule", True, True, id="both"),
        pytest.param(SPOT, "NoSchedule", True, True, id="both, and the taint keeps pods away"),
        pytest.param(SPOT, "NoExecute", False, True, id="a taint that evicts"),
    ],
)
def test_only_a_machine_that_is_about_to_leave_ends_a_gang(
    key: str, effect: str, cordoned: bool, leaves: bool
):
    world = placed()
    taint(world, key, effect, cordoned=cordoned)
    world.settle()
    assert world.job.status.attempt == leaves
    assert world.job.status.disruptions == leaves


def test_a_machine_of_another_job_does_not_matter():
    world = placed()
    taint(world, SPOT, node=2)
    assert world.settle().deletes == ()
    assert world.job.status.attempt == 0


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        ({"key": SPOT, "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, False),
    ],
)
def test_a_job_that_tolerates_the_taint_stays(toleration: dict[str, str], stays: bool):
    """Else its next gang could start on the same machine, again and again."""
    world = placed(scheduling={"tolerations": [toleration]})
    taint(world, SPOT)
    world.settle()
    assert world.job.status.attempt == (not stays)


def test_a_job_that_never_restarts_stays_until_its_machine_is_gone():
    world = placed(reliability={"restartPolicy": "Never"})
    taint(world, SPOT)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 0)


def test_a_gang_that_starts_leaves_too_but_not_for_pods_that_have_ended():
    world = World(make_job(numNodes=2), make_queue())
    world.node("node-1")
    world.settle()
    world.place(world.workers()[0].metadata.name, "node-1")
    taint(world, SPOT)
    world.settle()
    assert world.job.status.attempt == 1
    world = placed()
    taint(world, SPOT)
    world.pod(world.workers()[1].metadata.name, phase="Succeeded")
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 0)


def test_a_failure_comes_first():
    world = placed()
    fail(world)
    taint(world, SPOT)
    world.step()
    (end,) = world.job.status.attempts
    assert (end.reason, end.counted) == ("ExitCode", True)


def test_no_back_off_follows():
    world = placed()
    for _ in range(2):  # early failures, after which another one would delay the next gang
        fail(world)
        world.settle()
        world.containers_stop()
        world.settle()
        for index, pod in enumerate(world.workers()):
            world.place(pod.metadata.name, f"node-{index}")
        world.all_workers("Running")
        world.settle()
    for attempt in range(3, 6):
        taint(world, SPOT)
        world.step()
        assert (world.job.status.reason, world.job.status.attempt) == ("MachineLeaving", attempt)
        world.settle()
        world.containers_stop()
        for index, pod in enumerate(world.workers()):
            world.place(pod.metadata.name, f"node-{index}")
        taint(world, "")
        world.settle()
        world.all_workers("Running")
        world.settle()
        assert world.phase == "Running"
        world.pass_time(seconds=5)
    assert world.job.status.disruptions == 3


@pytest.mark.parametrize("writes", [0, 1])
def test_a_crash_in_between_counts_once(writes: int):
    world = placed()
    taint(world, SPOT)
    world.step(writes)
    world.settle()
    status = world.job.status
    assert (JOBS.plural, "train") not in world.objects
    assert (status.attempt, status.restarts, status.disruptions) == (1, 0, 1)
    assert [(end.number, end.reason) for end in status.attempts] == [(0, "MachineLeaving")]


def test_an_elastic_gang_keeps_its_size():
    world = elastic()
    world.node("node-1")
    world.all_workers("Running")
    world.settle()
    size = world.job.status.num_nodes
    taint(world, SPOT)
    world.settle()
    assert (world.job.status.attempt, world.job.status.num_nodes) == (1, size)


def test_all_pods_of_a_gang_with_a_head_end():
    world = placed(head={"command": "python head.py"})
    taint(world, SPOT)
    world.settle()
    world.settle()
    assert (world.job.status.attempt, world.job.status.disruptions) == (1, 1)
    jobs = [name for plural, name in world.objects if plural == JOBS.plural]
    assert sorted(jobs) == ["train-r1", "train-r1-w"]


def test_the_taint_wakes_the_jobs_of_the_machine():
    world = placed()
    assert world.nodes is not None
    before = node_facts(world.nodes["node-1"])
    taint(world, "nvidia.com/gpu")
    assert node_facts(world.nodes["node-1"]) == before
    taint(world, SPOT)
    assert node_facts(world.nodes["node-1"]) != before
