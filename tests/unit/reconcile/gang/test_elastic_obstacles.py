"""Probe pods ask for room only if a larger gang waits for nothing else."""

import pytest
from msgspec.structs import replace

from torchrun_api.core import PersistentVolumeClaim
from torchrun_api.kinds import CLAIMS
from unit.reconcile.gang.test_elastic import grow_time, probe_placed, probes, shrink
from world import ZIP, World, make_job, make_queue

UPLOADED = {"torchrun.ai/workspace-sha256": "ab" * 32}


def shrunk(**queue: object) -> World:
    """A running gang of 2 of 3 nodes with an uploaded workspace and a setup."""
    job = make_job(
        numNodes=3,
        elastic={"minNodes": 1, "maxNodes": 4},
        volumes=ZIP,
        annotations_=UPLOADED,
        setupCommand="make",
    )
    world = World(job, make_queue(**queue))
    world.settle()
    world.sync_done()
    world.settle()
    world.setup_done()
    world.settle()
    return shrink(world)


def test_the_setup_of_a_larger_gang_comes_before_its_probes():
    world = shrunk()
    world.spec(setup_command="make all")
    grow_time(world)
    assert probes(world) == []
    waiting = "The resize to 3 nodes is waiting."
    assert waiting in world.job.status.message
    assert world.condition("FullSize").message.startswith(waiting)
    world.setup_done()
    world.settle()
    assert probes(world) == ["train-probe-0"]
    assert world.condition("FullSize").reason == "WaitingForCapacity"
    probe_placed(world, 0)
    world.settle()
    assert world.job.status.num_nodes == 3


def test_a_failed_setup_of_a_larger_gang_causes_no_writes():
    world = shrunk()
    world.spec(setup_command="make all")
    grow_time(world)
    message = '{"reason": "SetupFailed", "message": "no compiler"}'
    setup_pod = world.observed().workspace.setup_pods[-1].metadata.name
    world.end_container(setup_pod, "setup", exit_code=2, message=message)
    world.settle()
    world.pass_time(hours=1)
    world.settle()
    assert (world.phase, probes(world)) == ("Running", [])
    assert world.condition("FullSize").reason == "SetupFailed"
    assert "no compiler" in world.condition("FullSize").message


@pytest.mark.parametrize("is_placed", [False, True])
def test_probes_are_deleted_while_a_larger_gang_waits_for_its_setup(is_placed):
    world = shrunk()
    grow_time(world)
    assert probes(world) == ["train-probe-0"]
    world.spec(setup_command="make all")
    if is_placed:
        probe_placed(world, 0)
    world.settle()
    assert probes(world) == []
    assert world.job.status.num_nodes == 2


def test_no_probes_while_a_pvc_is_being_deleted():
    world = shrunk(storage={"checkpoints": {}})
    key = (CLAIMS.plural, "train-checkpoints")
    claim: PersistentVolumeClaim = world.objects[key]
    meta = replace(claim.metadata, deletion_timestamp=world.now)
    world.objects[key] = replace(claim, metadata=meta)
    grow_time(world)
    assert probes(world) == []
    assert world.condition("FullSize").reason == "ClaimTerminating"
