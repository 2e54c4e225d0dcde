"""The conditions of a waiting job: no sentence is in two of them."""

import re
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.kai import KAI_POD_GROUPS
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO_POD_GROUPS
from unit.reconcile.failing import running
from world import World, make_job, make_queue

SENTENCE = re.compile(r"(?<=[.!?]) ")
ELASTIC = {"minNodes": 2, "maxNodes": 4}
# Of KAI 0.17, about a gang that does not fit.
KAI_MESSAGE = (
    "Resources were found for 2 pods while 4 are required for gang scheduling."
    " Additional pods cannot be scheduled due to:"
    " 0/2 nodes are available: 2 node(s) didn't have enough resources: GPUs."
)


def conditions_with(world: World) -> dict[str, list[str]]:
    """The types of the conditions with each sentence."""
    types: dict[str, list[str]] = {}
    for condition in world.job.status.conditions:
        for text in SENTENCE.split(condition.message):
            types.setdefault(text, []).append(condition.type)
    return types


def repeated(world: World) -> dict[str, list[str]]:
    return {text: types for text, types in conditions_with(world).items() if len(types) > 1}


def world_of(gang: str, kind: Any, **spec: Any) -> World:
    world = World(make_job(numNodes=4, **spec), make_queue(scheduling={"gang": gang}))
    world.installed = Installed(resources=frozenset({(kind.api_version, kind.plural)}))
    world.settle()
    return world


def refuse_group(world: World) -> None:
    """KAI writes why it does not place the gang into the PodGroup."""
    key = (KAI_POD_GROUPS.plural, "train")
    group = world.objects[key]
    refusal = {"type": "UnschedulableOnNodePool", "status": "True", "message": KAI_MESSAGE}
    status = msgspec.convert({"schedulingConditions": [refusal]}, type(group.status))
    world.objects[key] = replace(group, status=status)


def shrink(world: World) -> None:
    """Two workers of an elastic gang of four find no node."""
    for index in (0, 1):
        world.pod(f"train-{index}-abcde", phase="Running")
    world.settle()
    world.pass_time(seconds=40)
    world.settle()


def test_the_message_of_kai_is_in_the_status_and_in_one_condition() -> None:
    world = world_of("kai", KAI_POD_GROUPS)
    world.all_workers("Running")
    world.not_placed(KAI_MESSAGE, *range(4))
    refuse_group(world)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Queued", "Unschedulable")
    assert KAI_MESSAGE in world.job.status.message
    assert conditions_with(world)[SENTENCE.split(KAI_MESSAGE)[1]] == ["Scheduled"]
    assert not repeated(world)
    assert world.condition("Running").message == (
        "Not all pods are scheduled. See the condition Scheduled."
    )


def test_a_gang_that_kai_refuses_has_the_message_in_one_condition() -> None:
    world = world_of("kai", KAI_POD_GROUPS)
    refuse_group(world)
    world.settle()
    assert world.job.status.reason == "GangUnschedulable"
    assert conditions_with(world)[SENTENCE.split(KAI_MESSAGE)[1]] == ["Scheduled"]
    assert not repeated(world)


def test_running_says_why_pods_with_a_node_do_not_start_and_scheduled_how_many_have_one() -> None:
    world = world_of("kai", KAI_POD_GROUPS)
    for index in range(4):
        world.container_waits(f"train-{index}-abcde", "ErrImagePull", "no such image")
    world.settle()
    assert world.job.status.reason == "ImagePullFailed"
    message = "4 of 4 pods (first: train-0-abcde): container trainer: no such image."
    assert world.condition("Running").message == message
    assert world.condition("Scheduled").message == "4 of 4 pods are scheduled."
    assert world.job.status.message == f"4 of 4 pods are scheduled. {message}"
    assert not repeated(world)


def test_a_gang_that_waits_for_the_old_one_refers_to_its_size() -> None:
    world = world_of("volcano", VOLCANO_POD_GROUPS, elastic=ELASTIC)
    shrink(world)
    assert world.job.status.reason == "WaitingForOldGang"
    assert not repeated(world)


def run_and_stop(suspend: bool) -> World:
    """A gang that has run, and that is suspended, or preempted, and gone."""
    world = World(make_job(numNodes=2), make_queue(quota={"nodes": 4}))
    world.settle()
    world.admit(2)
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.condition("Scheduled").status == "True"
    if suspend:
        world.suspend()
        assert world.phase == "Suspended"
    else:
        world.preempt()
        world.settle()
        world.containers_stop()
        world.settle()
        assert world.phase == "Preempted"
    return world


@pytest.mark.parametrize("suspend", [True, False])
def test_a_job_whose_gang_was_stopped_is_not_scheduled(suspend: bool) -> None:
    world = run_and_stop(suspend)
    scheduled = world.condition("Scheduled")
    assert (scheduled.status, scheduled.reason) == ("False", "NotScheduled")
    assert scheduled.message == "The job has no gang."


def test_a_resumed_job_that_waits_for_admission_is_not_scheduled() -> None:
    world = run_and_stop(suspend=True)
    world.admission(False, "InsufficientQuota", "The quota is used.", None)
    world.resume()
    assert (world.phase, world.job.status.reason) == ("Queued", "WaitingForAdmission")
    assert world.condition("Scheduled").status == "False"
    world.admit(2)
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.condition("Scheduled").reason == "WorkersScheduled"


def test_pods_of_a_suspended_gang_stay_scheduled_until_they_are_gone() -> None:
    world = running(1)
    world.spec(suspend=True)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Running", "Suspending")
    assert world.condition("Scheduled").status == "True"


def test_a_job_that_fails_without_a_gang_keeps_how_its_last_one_was_scheduled() -> None:
    never = {"restartPolicy": "Never"}
    world = World(make_job(numNodes=1, reliability=never), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.delete_child_job()
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "JobDeleted")
    assert world.condition("Scheduled").status == "True"
