"""Resizes by the user: at once, from the checkpoint, and not counted as restarts."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import PersistentVolumeClaim
from torchrun_api.kinds.resources import CLAIMS, JOBS
from unit.reconcile.gang.test_elastic import elastic, place, shrunk
from world import ZIP, World, make_job, make_queue


def test_an_edit_of_num_nodes_resizes_at_once():
    world = shrunk()
    world.spec(num_nodes=4)
    plan = world.step()
    assert [event.reason for event in plan.events] == ["Resizing"]
    assert "from 2 to 4 nodes, as spec.numNodes was changed" in world.job.status.message
    assert world.job.status.num_nodes == 4


def test_a_gang_of_the_new_size_continues():
    world = shrunk()
    world.spec(num_nodes=2)
    world.settle()
    assert (world.job.status.attempt, world.job.status.reason) == (1, "WorkersRunning")


@pytest.mark.parametrize("writes", [0, 1])
def test_a_crash_during_a_resize_loses_neither_size_nor_count(writes):
    world = elastic()
    place(world, 2)
    world.pass_time(seconds=30)
    world.step(writes)
    world.settle()
    assert (JOBS.plural, "train") not in world.objects
    status = world.job.status
    assert (status.num_nodes, status.attempt, status.restarts) == (2, 1, 0)
    assert [(a.number, a.reason) for a in status.attempts] == [(0, "Shrinking")]


def test_a_resized_gang_gets_its_full_grace_period():
    world = elastic()
    world.all_workers("Running")
    world.settle()
    world.spec(num_nodes=2)
    world.step(1)
    plan = world.step()
    assert [(d.kind.plural, d.name, d.grace_seconds) for d in plan.deletes] == [
        (JOBS.plural, "train", None)
    ]


def test_resizes_do_not_delay_the_restart_after_a_failure():
    world = shrunk()
    for size in (3, 2, 1):
        world.spec(num_nodes=size)
        world.settle()
        world.containers_stop()
        world.settle()
        world.all_workers("Running")
        world.settle()
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.settle()
    assert world.job.status.reason != "BackingOff"


def test_a_resumed_job_has_the_requested_size():
    world = shrunk()
    world.suspend()
    assert world.phase == "Suspended"
    assert all(c.type != "FullSize" for c in world.job.status.conditions)
    world.resume()
    assert world.job.status.num_nodes == 3


def test_a_gang_that_grows_from_one_node_can_share_its_pvcs():
    world = on_one_node()
    claims = [world.objects[CLAIMS.plural, name] for name in CLAIM_NAMES]
    assert [claim.spec.access_modes for claim in claims] == [("ReadWriteMany",)] * 2
    scale_up(world)
    assert all(condition.type != "StorageShared" for condition in world.job.status.conditions)


def test_a_pvc_for_one_node_stays_as_it_is():
    """An earlier controller created it."""
    world = on_one_node()
    for name in CLAIM_NAMES:
        claim: PersistentVolumeClaim = world.objects[CLAIMS.plural, name]
        spec = replace(claim.spec, access_modes=("ReadWriteOnce",))
        world.objects[CLAIMS.plural, name] = replace(claim, spec=spec)
    world.plans.clear()
    world.pod("train-0-abcde", phase="Failed")
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 1)
    scale_up(world)
    assert not [a for plan in world.plans for a in plan.applies if a.kind is CLAIMS]
    assert world.condition("StorageShared").status == "False"


CLAIM_NAMES = ("train-workspace", "train-checkpoints")


def on_one_node() -> World:
    """A running elastic job of one node, with PVCs for its workspace and checkpoints."""
    job = make_job(
        numNodes=1,
        elastic={"minNodes": 1, "maxNodes": 8},
        volumes=ZIP,
        annotations_={"torchrun.ai/workspace-sha256": "ab" * 32},
    )
    world = World(job, make_queue(storage={"checkpoints": {}}))
    world.settle()
    world.sync_done()
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def scale_up(world: World) -> None:
    world.spec(num_nodes=4)
    world.settle()
    world.containers_stop()
    world.settle()
    assert world.job.status.num_nodes == 4


def test_a_gang_that_fails_has_at_least_min_nodes_next():
    world = shrunk(nodes=4)
    world.spec(elastic=replace(world.job.spec.elastic, min_nodes=3))
    world.settle()
    assert (world.phase, world.job.status.num_nodes) == ("Running", 2)
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.settle()
    assert (world.job.status.attempt, world.job.status.num_nodes) == (2, 3)
