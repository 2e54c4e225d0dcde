"""Which gangs replace single pods, and how the job says that its gang does not."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api import contract, names
from torchrun_api.kinds import JOBS
from torchrun_api.meta import Condition
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.schedulers.kai import KAI_POD_GROUPS
from torchrun_controller.reconcile.schedulers.kueue import KUEUE_WORKLOADS
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO_POD_GROUPS
from unit.reconcile.replacing import REPORTING, replace_lost, run, stop
from world import World, make_job, make_queue

SERVED = Installed(
    resources=frozenset(
        (kind.api_version, kind.plural)
        for kind in (KAI_POD_GROUPS, VOLCANO_POD_GROUPS, KUEUE_WORKLOADS[0])
    )
)
POD = {"podReplacement": "Pod"}


def world_of(queue: dict[str, Any] | None = None, **spec: Any) -> World:
    world = World(
        make_job(**{"numNodes": 2, "reliability": POD, **spec}), make_queue(**(queue or {}))
    )
    world.nodes = {}
    world.installed = SERVED
    world.defaults = REPORTING
    return world


def child_of(world: World) -> Any:
    return next(apply.body for apply in world.plan().applies if apply.kind is JOBS)


def replaces_pods(world: World) -> bool:
    """Whether annotation, limit and launchers of the next gang agree that it does."""
    body = child_of(world)
    (trainer,) = body["spec"]["template"]["spec"]["containers"]
    values = [e["value"] for e in trainer["env"] if e["name"] == contract.IN_PLACE_RESTARTS.name]
    answers = {
        "replaceSeconds" in (json.loads(values[0]) if values else {}),
        "backoffLimitPerIndex" in body["spec"],
        body["spec"].get("backoffLimit") != 0,
        names.POD_REPLACEMENT in body["metadata"].get("annotations", {}),
    }
    assert len(answers) == 1
    return answers.pop()


def warning(world: World) -> str:
    world.settle()
    conditions = world.job.status.conditions
    return next((c.message for c in conditions if c.type == "NotYetSupported"), "")


def test_a_gang_replaces_pods_if_its_job_or_its_queue_asks_for_it():
    assert replaces_pods(world_of())
    assert replaces_pods(world_of({"reliability": POD}, reliability={}))
    assert not replaces_pods(world_of(reliability={}))
    assert not replaces_pods(world_of({"reliability": POD}, reliability={"podReplacement": "Gang"}))
    assert warning(world_of()) == ""
    assert warning(world_of(reliability={})) == ""


def test_the_launchers_wait_for_pods_also_without_restarts():
    body = child_of(world_of(reliability={**POD, "maxRestarts": 0}))
    (trainer,) = body["spec"]["template"]["spec"]["containers"]
    (value,) = (e["value"] for e in trainer["env"] if e["name"] == contract.IN_PLACE_RESTARTS.name)
    assert json.loads(value) == {
        "replaceSeconds": 360,
        "restarts": 0,
        "exitCodes": [],
        "signals": [],
    }


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"reliability": {**POD, "restartScope": "Gang"}}, "restartScope Gang"),
        ({"reliability": {**POD, "restartPolicy": "Never"}}, "restartPolicy Never"),
        ({"head": {}, "numNodes": 3}, "spec.head"),
        ({"queue": {"scheduling": {"gang": "kai"}}}, "gang scheduler KAI"),
    ],
)
def test_a_job_says_why_its_pods_are_not_replaced_alone(spec, text):
    world = world_of(spec.pop("queue", None), **spec)
    assert not replaces_pods(world)
    message = warning(world)
    assert message.startswith("reliability.podReplacement Pod has no effect")
    assert text in message


def test_without_nodes_or_reports_of_workers_the_gang_is_replaced():
    world = world_of()
    world.nodes = None
    assert not replaces_pods(world)
    assert "has not read the nodes" in warning(world)
    world = world_of()
    world.defaults = replace(REPORTING, progress_url="")
    assert not replaces_pods(world)
    assert "do not report" in warning(world)


def test_a_gang_of_one_node_has_no_others():
    world = world_of(numNodes=1)
    assert not replaces_pods(world)
    assert warning(world) == ""


def test_an_unknown_scheduler_is_no_obstacle():
    world = world_of()
    world.queue = None
    assert warning(world) == ""
    world = world_of({"scheduling": {"gang": "kai", "scheduler": "volcano"}})
    assert warning(world) == ""
    assert world.job.status.reason == "InvalidSpec"


@pytest.mark.parametrize("gang", ["volcano", "kueue", "none"])
def test_schedulers_that_place_single_pods(gang):
    assert replaces_pods(world_of({"scheduling": {"gang": gang}}))
    assert SCHEDULERS[gang].places_single_pods


# Kueue


def admitted() -> World:
    world = world_of({"scheduling": {"gang": "kueue"}}, numNodes=3)
    for index in range(4):
        world.node(f"node-{index}")
    world.settle()
    resume(world)
    return world


def resume(world: World) -> None:
    """Kueue admits the child Job, and the Job controller creates its pods."""
    for pod in world.workers():
        meta = replace(pod.metadata, creation_timestamp=world.now)
        world.objects["pods", pod.metadata.name] = replace(pod, metadata=meta)
    world.resume_child("train")
    admit(world)
    run(world)
    assert world.phase == "Running"


def admit(world: World) -> None:
    """Kueue admits the child Job, and the Job controller sets its condition."""
    child = world.objects["jobs", "train"]
    spec = replace(child.spec, suspend=False)
    resumed = Condition(type="Suspended", status="False", last_transition_time=world.now)
    status = replace(child.status, conditions=(resumed,))
    world.objects["jobs", "train"] = replace(child, spec=spec, status=status)
    world.settle()


def suspend(world: World) -> None:
    child = world.objects["jobs", "train"]
    spec = replace(child.spec, suspend=True)
    world.objects["jobs", "train"] = replace(child, spec=spec)


def test_a_pod_that_kueue_may_have_deleted_is_recorded_a_moment_later():
    world = admitted()
    stop(world, 1)
    assert world.job.status.attempts == ()
    world.pass_time(seconds=3)
    world.settle()
    assert [end.reason for end in world.job.status.attempts] == ["PodDeleted"]
    replace_lost(world)
    run(world)
    assert (world.phase, world.job.status.disruptions) == ("Running", 1)


def test_a_suspension_by_kueue_replaces_no_pod():
    world = admitted()
    stop(world, 1)
    suspend(world)
    world.settle()
    assert (world.job.status.attempts, world.job.status.disruptions) == ((), 0)


@pytest.mark.parametrize("ended", [0, 2])
def test_pods_that_a_suspension_deletes_are_not_lost(ended):
    """Kueue admits the Job again while all of its pods, or the last one, save a checkpoint."""
    world = admitted()
    suspend(world)
    for pod in world.workers():
        world._ending(("pods", pod.metadata.name), 300)
    world.settle()
    world.pass_time(seconds=20)
    for pod in world.workers()[:ended]:
        del world.objects["pods", pod.metadata.name]
    admit(world)
    world.pass_time(seconds=5)
    world.settle()
    status = world.job.status
    assert (len(world.gangs), status.attempts, status.disruptions) == (1, (), 0)


def test_a_resumed_job_starts_to_count_again():
    world = admitted()
    stop(world, 1)
    world.pass_time(seconds=3)
    world.settle()
    replace_lost(world)
    run(world)
    suspend(world)
    world.settle()
    world.pass_time(seconds=60)
    resume(world)
    world.pass_time(seconds=60)
    lost = world.workers()[1].metadata.name
    world._ending(("pods", lost), 30)
    world.containers_stop()
    world.pass_time(seconds=10)
    (name,) = world.replace_pods()  # the controller has not seen the end of the pod before it
    world.place(name, "node-1")
    world.rest()
    status = world.job.status
    assert (status.attempt, status.disruptions) == (0, 2)
    assert status.reason == "BackingOff", "the record of the earlier pod proves nothing"
    assert not any("/" in pod.metadata.annotations.start for pod in world.workers())
