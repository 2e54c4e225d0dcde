"""What the steps of a reconcile share."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.job.assess import Assessment, assess
from torchrun_controller.reconcile.model.phases import State
from unit.reconcile.test_invariants import Histories, Reaction
from world import DEFAULTS, World, make_job, make_queue


def test_the_end_of_a_gang_that_no_status_recorded_is_counted_once() -> None:
    history = Histories()
    history.submit(nodes=2, zipped=True, max_restarts=0, setup=False, queue=True)
    history.nothing(reaction=Reaction.ONE_RECONCILE)
    history.sync_pod_changes(phase="Running", reaction=Reaction.NONE_YET)
    history.sync_pod_changes(phase="Succeeded", reaction=Reaction.KILLED_BEFORE_STATUS)
    history.child_job_is_deleted(reaction=Reaction.KILLED_BEFORE_STATUS)
    history.gang_is_force_deleted(reaction=Reaction.NONE_YET)
    history.sync_pod_is_deleted(reaction=Reaction.ONE_RECONCILE)
    world = history.world
    assert [end.number for end in world.job.status.attempts] == [world.job.status.attempt]
    ends = world.job.status.attempts
    history.child_job_is_deleted(reaction=Reaction.TO_THE_END)
    assert world.job.status.attempts == ends
    assert (world.job.status.attempt, world.job.status.disruptions) == (1, 1)


def variables(world: World, endpoint: str) -> tuple[dict[str, str], Any]:
    """The variables of the workers, and the status."""
    plan = reconcile(world.observed(), world.now, replace(DEFAULTS, etcd_endpoint=endpoint))
    jobs: Iterator[Any] = (apply.body for apply in plan.applies if apply.kind.kind == "Job")
    containers = next(jobs)["spec"]["template"]["spec"]["containers"]
    return {v["name"]: v.get("value", "") for v in containers[0]["env"]}, plan.status


ETCD = {"distributed": {"rdzvBackend": "etcd-v2"}}
NAMED = {"distributed": {"rdzvBackend": "etcd-v2", "rdzvEndpoint": "own:2379"}}


@pytest.mark.parametrize(
    ("job", "queue", "default", "backend", "endpoint"),
    [
        (ETCD, {}, "etcd.infra:2379", "etcd-v2", "etcd.infra:2379"),
        ({}, ETCD, "etcd.infra:2379", "etcd-v2", "etcd.infra:2379"),
        (NAMED, {}, "etcd.infra:2379", "etcd-v2", "own:2379"),
        ({}, {}, "etcd.infra:2379", None, None),
        (ETCD, {}, "", None, None),
    ],
)
def test_the_rendezvous(
    job: dict[str, Any],
    queue: dict[str, Any],
    default: str,
    backend: str | None,
    endpoint: str | None,
):
    world = World(make_job(numNodes=2, **job), make_queue(**queue))
    env, status = variables(world, default)
    assert (env.get("PET_RDZV_BACKEND"), env.get("PET_RDZV_ENDPOINT")) == (backend, endpoint)
    falls_back = bool(job or queue) and backend is None
    assert any(c.type == "NotYetSupported" for c in status.conditions) is falls_back


def assessed(world: World) -> Assessment:
    return assess(world.observed(), world.now, world.defaults)


def running() -> World:
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def test_a_gang_that_goes_on_needs_no_next_attempt():
    assessment = assessed(running())
    assert assessment.gang is not None
    assert assessment.gang.state is State.GANG_RUNNING
    assert (assessment.end, assessment.survivors, assessment.next_attempt) == (None, (), None)


def test_a_failed_gang_has_an_end_and_a_next_attempt():
    world = running()
    world.end_container(world.workers()[0].metadata.name, "trainer", exit_code=1)
    assessment = assessed(world)
    assert assessment.end is not None
    assert assessment.next_attempt is not None
    assert assessment.next_attempt.cause == assessment.end.attempt
    assert assessment.next_attempt.history.counts.restarts == 1
    survivor = world.workers()[1].metadata.name
    assert [delete.name for delete in assessment.survivors] == [survivor]


def test_no_attempt_follows_while_the_job_is_suspended():
    world = running()
    world.spec(suspend=True)
    world.settle()
    assert assessed(world).next_attempt is None


def test_an_invalid_spec_is_part_of_the_next_attempt():
    next_attempt = assessed(World(make_job(numGPUs=4), make_queue())).next_attempt
    assert next_attempt is not None
    assert next_attempt.spec_problem is not None
    assert next_attempt.spec_problem.reason == "InvalidSpec"
    assert next_attempt.preparation is None


def test_nothing_more_is_computed_of_a_finished_job():
    world = running()
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    assessment = assessed(world)
    assert (assessment.gang, assessment.next_attempt) == (None, None)
