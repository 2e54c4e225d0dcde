"""A running gang without a record of its admission: the charge is what its pods run with."""

from msgspec.structs import replace

from admitting import submitted
from torchrun_api.kinds.admission import Admission
from torchrun_api.kinds.job import JobNodeResources
from torchrun_api.kinds.resources import JOBS
from unit.reconcile.admission.classifying import classify_world, deliver
from world import START, World, make_job, make_queue

NODES = {"nodeResources": {"gpus": 8, "cpus": 8}}
NO_GPUS = {**NODES, "quota": {"gpus": 0}}


def edited(**spec: object) -> World:
    """A gang without GPUs, in a queue that takes no part, whose job now requests 8 on each node."""
    world = World(make_job(numNodes=4, nodeResources={"gpus": 0}, **spec), make_queue(**NODES))
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.spec(node_resources=JobNodeResources(gpus=8))
    world.settle()
    return world


def gpus(world: World) -> int:
    workload = classify_world(world).workload
    assert workload is not None
    return workload.gpus


def test_an_edit_before_the_first_quota_is_not_admitted_with_the_gang() -> None:
    world = edited()
    world.queue = make_queue(**NO_GPUS)
    deliver(world)
    admission = world.job.status.admission
    assert (admission.nodes, admission.queue, admission.gpus) == (4, "gpu", 0)
    assert admission.requests == {"cpu": "8"}
    world.pod("train-0-abcde", phase="Failed")
    world.settle()
    assert len(world.gangs) == 1, "the next gang needs a new admission"
    assert "requests 8 GPUs on each node, but was admitted with 0." in world.job.status.message


def test_an_edit_while_the_queue_has_no_quota_is_not_admitted_with_the_gang() -> None:
    world = World(make_job(numNodes=4, nodeResources={"gpus": 0}), make_queue(**NO_GPUS))
    world.settle()
    world.admit(4)
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.spec(node_resources=JobNodeResources(gpus=8))
    world.queue = make_queue(**NODES)
    world.settle()
    deliver(world)
    assert world.job.status.admission is None
    world.queue = make_queue(**NO_GPUS)
    deliver(world)
    assert world.job.status.admission.gpus == 0


def test_pods_without_a_job_are_charged_for_what_they_run_with() -> None:
    """kubectl delete job --cascade=orphan."""
    world = edited()
    del world.objects[JOBS.plural, "train"]
    world.queue = make_queue(**NO_GPUS)
    assert gpus(world) == 0


def test_the_latest_gang_counts() -> None:
    """The pods of the previous gang may still terminate."""
    world = edited()
    world.pod("train-0-abcde", phase="Failed")
    world.settle()
    assert len(world.gangs) == 2
    world.queue = make_queue(**NO_GPUS)
    assert gpus(world) == 8
    for name in ("train", "train-r1"):
        world.objects.pop((JOBS.plural, name), None)
    assert gpus(world) == 8


def test_a_job_that_waits_is_admitted_for_its_spec() -> None:
    world = edited(reliability={"maxRestarts": 3})
    world.queue = make_queue(**NO_GPUS)
    world.suspend()
    world.resume()
    workload = classify_world(world).workload
    assert (workload.admitted, workload.gpus) == (0, 8)


def test_an_elastic_gang_with_smaller_pods_is_not_admitted_for_more_nodes() -> None:
    """Its next gang needs a new admission in any case."""
    world = edited(elastic={"minNodes": 1, "maxNodes": 8})
    world.spec(num_nodes=6)
    world.queue = make_queue(**NODES, quota={"gpus": 64})
    workload = classify_world(world).workload
    assert (workload.admitted, workload.nodes, workload.gpus) == (4, 4, 0)
    world.spec(node_resources=JobNodeResources(gpus=0))
    assert classify_world(world).workload.nodes == 6


def test_an_unrecorded_admission_without_a_gang_counts_by_the_spec() -> None:
    world = submitted({**NODES, "quota": {"gpus": 64}})
    world.admit(2)
    status = replace(world.job.status, admission=Admission(nodes=2, time=START))
    world.job = replace(world.job, status=status)
    workload = classify_world(world).workload
    assert (workload.admitted, workload.gpus) == (2, 8)
