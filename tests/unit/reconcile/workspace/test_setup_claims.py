"""The setup after a new workspace PVC: an environment of the former one counts no more."""

import pytest

from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS
from world import ZIP, World, make_job, make_queue

DIGEST = {"torchrun.ai/workspace-sha256": "ab" * 32}


def running() -> World:
    job = make_job(numNodes=1, volumes=ZIP, requirements=["einops"], annotations_=DIGEST)
    world = World(job, make_queue())
    world.settle()
    world.sync_done()
    world.settle()
    world.setup_done()
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.pass_time(seconds=60)
    return world


def lose_claim(world: World) -> None:
    del world.objects[CLAIMS.plural, "train-workspace"]


def fails(world: World) -> None:
    world.end_container(world.workers()[0].metadata.name, "trainer", exit_code=1)
    world.settle()
    world.pass_time(minutes=10)
    world.settle()


def fails_without_a_claim(world: World) -> None:
    lose_claim(world)
    fails(world)


def resumes_with_a_new_claim(world: World) -> None:
    world.suspend()
    lose_claim(world)
    world.pass_time(seconds=60)
    world.resume()


def setup_pods(world: World) -> list[str]:
    return [pod.metadata.name for pod in world.observed().workspace.setup_pods]


@pytest.mark.parametrize("begin_again", [resumes_with_a_new_claim, fails_without_a_claim])
def test_a_new_claim_gets_the_environment_again(begin_again):
    world = running()
    begin_again(world)
    assert world.created[-1] == (PODS.plural, "train-sync-1")
    world.sync_done()
    world.settle()
    assert world.created[-1] == (PODS.plural, "train-setup-1")
    pods = world.observed().workspace.setup_pods
    assert len({pod.metadata.annotations.setup_key for pod in pods}) == 1, "the same content"
    world.setup_done()
    world.settle()
    assert world.created[-1] == (JOBS.plural, "train-r1")
    world.all_workers("Running")
    world.settle()
    fails(world)
    assert world.created[-1] == (JOBS.plural, "train-r2")
    assert setup_pods(world) == ["train-setup-0", "train-setup-1"]


def test_a_setup_pod_of_a_former_claim_is_not_kept():
    world = running()
    resumes_with_a_new_claim(world)
    world.sync_done()
    world.settle()
    evicted = Condition(type="DisruptionTarget", status="True", reason="EvictionByEvictionAPI")
    for number in (1, 2):
        world.pod(f"train-setup-{number}", phase="Failed", conditions=(evicted,))
        world.pass_time(minutes=5)
        world.settle()
    assert setup_pods(world) == ["train-setup-2", "train-setup-3"]


def test_a_setup_pod_of_a_former_claim_ends_with_it():
    """It has not started yet, and would mount the new PVC."""
    world = running()
    world.spec(requirements=("einops", "rich"))
    fails(world)
    assert setup_pods(world) == ["train-setup-0", "train-setup-1"]
    lose_claim(world)
    world.pass_time(seconds=60)
    plan = world.step()
    assert [delete.name for delete in plan.deletes] == ["train-setup-1"]
    assert world.created[-1] == (PODS.plural, "train-sync-1")
    world.sync_done()
    world.settle()
    assert world.created[-1] == (PODS.plural, "train-setup-1")


def test_pods_of_a_claim_whose_clock_was_ahead_are_its_own():
    """API servers of one cluster have clocks of their own, and a clock can be set back."""
    job = make_job(numNodes=1, volumes=ZIP, requirements=["einops"], annotations_=DIGEST)
    world = World(job, make_queue())
    world.settle()
    world.pass_time(hours=-1)
    world.sync_done()
    world.settle()
    assert setup_pods(world) == ["train-setup-0"]
    world.setup_done()
    world.settle()
    assert world.created[-1] == (JOBS.plural, "train")
