"""A refused write affects its own object only, not the status or the rest of the job."""

from typing import Any

import pytest

from torchrun_api.kinds import JOBS, PODS, SERVICES
from torchrun_controller.client.apply import WriteResult
from torchrun_controller.client.write_errors import NameConflictError, UnavailableError
from torchrun_controller.controllers.controller import FORBIDDEN_RETRY, RequeueAfter
from torchrun_controller.controllers.job import MAX_ROUNDS
from torchrun_controller.controllers.writes import STATUS_INTERVAL
from torchrun_controller.reconcile.model.observed import Conflict
from torchrun_controller.reconcile.model.plan import Apply
from unit.controllers.refusing import NO_ANSWER, Cluster
from world import START, World, make_job, make_queue

SERVICE = ("Service", "train")


def cluster_of(**spec: Any) -> Cluster:
    """A running gang of two. Its Service was deleted and cannot be created again."""
    world = World(make_job(numNodes=2, **spec), make_queue())
    world.settle()
    world.all_workers("Running")
    del world.objects[SERVICES.plural, "train"]
    cluster = Cluster(world)
    cluster.refuses = {SERVICE}
    return cluster


async def test_a_running_gang_has_a_status_despite_refusals() -> None:
    cluster = cluster_of()
    assert await cluster.attempt() == RequeueAfter(FORBIDDEN_RETRY)
    world = cluster.world
    assert world.phase == "Running"
    warning = world.condition("WritesAccepted")
    assert (warning.status, warning.reason) == ("False", "Rejected")
    assert "services train: exceeded quota: few" in warning.message
    assert [e.reason for e in cluster.events if e.type == "Warning"] == ["Rejected"]


async def test_a_refused_write_is_retried_and_warned_of_once_a_minute() -> None:
    cluster = cluster_of()
    for _ in range(50):
        await cluster.attempt()
    assert cluster.requests.count(SERVICE) == 2
    cluster.refuses = set()
    cluster.world.pass_time(minutes=1)
    await cluster.attempt()
    await cluster.attempt()
    assert (SERVICES.plural, "train") in cluster.world.objects
    assert "WritesAccepted" not in {c.type for c in cluster.world.job.status.conditions}


async def test_a_refused_write_and_the_deadline() -> None:
    cluster = cluster_of(reliability={"activeDeadlineSeconds": 90})
    await cluster.attempts(minutes=3)
    assert cluster.world.phase == "TimedOut"
    assert (cluster.world.job.status.completion_time - START).total_seconds() == 126


async def test_a_failed_webhook_and_the_deadline() -> None:
    """The API server answers 500 to one kind of object only, for hours."""
    cluster = cluster_of(reliability={"activeDeadlineSeconds": 90})
    cluster.refuses, cluster.fails_webhook = set(), {SERVICE}
    assert await cluster.attempt() == RequeueAfter(FORBIDDEN_RETRY)
    world = cluster.world
    assert world.phase == "Running"
    assert f"services train: {NO_ANSWER}" in world.condition("WritesAccepted").message
    assert cluster.requests == [SERVICE], "the write is sent once in an attempt"
    await cluster.attempt()
    await cluster.attempts(minutes=3)
    assert world.phase == "TimedOut"


async def test_a_failed_webhook_and_a_restart() -> None:
    """A webhook for Jobs is away while a gang fails. The failure is recorded, and no gang lost."""
    cluster = cluster_of(reliability={"maxRestarts": 2})
    cluster.refuses, cluster.fails_webhook = set(), {("Job", "train-r1")}
    world = cluster.world
    await cluster.attempt()
    world.all_workers("Failed")
    await cluster.attempts(minutes=2)
    assert (world.phase, world.job.status.reason) == ("Pending", "Rejected")
    assert NO_ANSWER in world.job.status.message
    assert [attempt.counted for attempt in world.job.status.attempts] == [True]
    cluster.fails_webhook = set()
    world.pass_time(minutes=1)
    await cluster.attempt()
    assert (len(world.gangs), world.job.status.restarts) == (2, 1)
    await cluster.attempt()
    assert "WritesAccepted" not in {c.type for c in world.job.status.conditions}


async def test_a_failed_webhook_for_pods_does_not_hide_the_end_of_the_job() -> None:
    cluster = cluster_of(reliability={"maxRestarts": 0})
    cluster.refuses = set()
    await cluster.attempt()
    first, second = (pod.metadata.name for pod in cluster.world.workers())
    cluster.world.pod(first, phase="Failed")
    cluster.fails_webhook = {("Pod", second)}
    await cluster.attempt()
    assert cluster.world.phase == "Failed"
    assert f"delete pods {second}" in cluster.world.condition("WritesAccepted").message


async def test_a_refused_write_and_a_suspension() -> None:
    cluster = cluster_of()
    await cluster.attempt()
    cluster.world.spec(suspend=True)
    await cluster.attempt()
    assert (JOBS.plural, "train") not in cluster.world.objects
    cluster.world.containers_stop()
    await cluster.attempt()
    assert cluster.world.phase == "Suspended"
    # The next gang needs the Service. It waits, and the message says so.
    cluster.world.spec(suspend=False)
    await cluster.attempt()
    assert (cluster.world.phase, cluster.world.job.status.reason) == ("Pending", "Rejected")
    assert len(cluster.world.gangs) == 1
    cluster.refuses = set()
    cluster.world.pass_time(minutes=1)
    await cluster.attempt()
    assert len(cluster.world.gangs) == 2


async def test_a_refused_write_and_a_restart() -> None:
    """The end of the gang is recorded. The next one starts when all of its objects are accepted."""
    cluster = cluster_of(reliability={"maxRestarts": 2})
    await cluster.attempt()
    cluster.world.all_workers("Failed")
    await cluster.attempts(minutes=2)
    status = cluster.world.job.status
    assert (status.phase, status.reason, len(cluster.world.gangs)) == ("Pending", "Rejected", 1)
    assert [attempt.counted for attempt in status.attempts] == [True]
    cluster.refuses = set()
    cluster.world.pass_time(minutes=1)
    await cluster.attempt()
    assert (len(cluster.world.gangs), cluster.world.job.status.restarts) == (2, 1)
    assert (SERVICES.plural, "train") in cluster.world.objects


async def test_each_refusal_is_named_and_concerns_its_own_object() -> None:
    cluster = cluster_of(reliability={"maxRestarts": 2})
    cluster.refuses = set()
    await cluster.attempt()
    world = cluster.world
    world.pod("train-0-abcde", phase="Failed")
    world.pass_backoff()
    await cluster.attempt()
    assert len(world.gangs) == 2
    world.containers_stop()
    world.all_workers("Running")
    del world.objects[SERVICES.plural, "train"]
    cluster.refuses = {SERVICE, ("Pod", "train-r1-0-abcde")}
    await cluster.attempt()
    message = world.condition("WritesAccepted").message
    assert "services train" in message
    assert "pods train-r1-0-abcde" in message
    assert world.phase == "Queued", "workers whose leader has no start annotation do not run"
    cluster.refuses = {SERVICE}
    world.pass_time(minutes=1)
    await cluster.attempt()
    await cluster.attempt()
    assert world.phase == "Running"


async def test_a_forbidden_pod_delete_does_not_hide_the_end_of_the_job() -> None:
    cluster = cluster_of(reliability={"maxRestarts": 0})
    cluster.refuses = set()
    await cluster.attempt()
    first, second = (pod.metadata.name for pod in cluster.world.workers())
    cluster.world.pod(first, phase="Failed")
    cluster.forbids_deletes = {("Pod", second)}
    await cluster.attempt()
    assert cluster.world.phase == "Failed"
    assert f"delete pods {second}" in cluster.world.condition("WritesAccepted").message
    assert "Forbidden" in {event.reason for event in cluster.events}
    await cluster.attempt()
    assert cluster.requests.count(("Pod", second)) == 1
    cluster.forbids_deletes = set()
    cluster.world.pass_time(minutes=1)
    await cluster.attempt()
    cluster.world.containers_stop()
    await cluster.attempt()
    assert (PODS.plural, second) not in cluster.world.objects
    assert "WritesAccepted" not in {c.type for c in cluster.world.job.status.conditions}


async def test_a_forbidden_job_delete_is_shown_while_the_suspension_waits() -> None:
    cluster = cluster_of()
    cluster.refuses = set()
    await cluster.attempt()
    cluster.forbids_deletes = {("Job", "train")}
    cluster.world.spec(suspend=True)
    assert await cluster.attempt() == RequeueAfter(1.0)
    await cluster.attempt()
    assert cluster.world.job.status.reason == "Suspending"
    assert "delete jobs.batch train" in cluster.world.condition("WritesAccepted").message
    assert cluster.requests.count(("Job", "train")) == 1


async def test_a_gang_is_never_created_without_its_objects() -> None:
    world = World(make_job(numNodes=2), make_queue(networking={"isolate": True}))
    cluster = Cluster(world)
    cluster.refuses = {("NetworkPolicy", "train")}
    await cluster.attempts(minutes=5)
    assert {kind for kind, _ in cluster.requests} == {"NetworkPolicy"}
    assert (world.phase, world.gangs) == ("Pending", [])


def starting_cluster() -> Cluster:
    """A new job of two nodes, whose Service is refused while its Job is created."""
    cluster = Cluster(World(make_job(numNodes=2), make_queue()))
    cluster.refuses = {SERVICE}
    return cluster


async def test_a_first_gang_waits_for_its_service() -> None:
    cluster = starting_cluster()
    world = cluster.world
    for _ in range(3):
        await cluster.attempt()
        status = world.job.status
        assert (status.phase, status.reason) == ("Pending", "Rejected")
        assert "services train: exceeded quota: few" in status.message
        world.all_workers("Running")
    assert world.condition("Running").reason == "Rejected"
    assert world.condition("Running").status == "False"
    assert world.job.status.start_time is None, "no rank runs"
    assert world.job.status.workers.running == 2
    assert cluster.requests == [("Job", "train"), SERVICE], "the refused write is not repeated"
    cluster.refuses = set()
    world.pass_time(minutes=1)
    await cluster.attempt()
    await cluster.attempt()
    assert world.phase == "Running"
    assert cluster.requests == [("Job", "train"), SERVICE, SERVICE]
    assert (world.job.status.attempt, world.job.status.attempts) == (0, ())


async def test_a_new_process_waits_for_the_service_of_a_gang_that_it_does_not_know() -> None:
    cluster = starting_cluster()
    world = cluster.world
    cluster.loses_status = True
    await cluster.attempt()
    assert world.job.status.workers is None
    successor = Cluster(world)
    successor.refuses = {SERVICE}
    for _ in range(2):
        await successor.attempt()
        assert (world.phase, world.job.status.reason) == ("Pending", "Rejected")
    assert successor.requests == [SERVICE]


async def test_a_gang_that_waits_for_its_service_can_be_suspended() -> None:
    cluster = starting_cluster()
    world = cluster.world
    await cluster.attempts(minutes=2)
    world.spec(suspend=True)
    await cluster.attempt()
    world.containers_stop()
    await cluster.attempt()
    assert world.phase == "Suspended"
    assert (JOBS.plural, "train") not in world.objects
    world.spec(suspend=False)
    await cluster.attempts(minutes=2)
    assert (world.phase, len(world.gangs)) == ("Pending", 1), "the next one comes after its Service"


async def test_a_job_that_fails_while_its_service_is_refused_ends() -> None:
    cluster = cluster_of(reliability={"maxRestarts": 0})
    cluster.world.all_workers("Failed")
    await cluster.attempt()
    assert cluster.world.phase == "Failed"


async def test_no_job_of_a_head_is_created_without_the_service() -> None:
    world = World(make_job(numNodes=2, head={"nodeResources": {"cpus": 2}}), make_queue())
    cluster = Cluster(world)
    cluster.refuses = {SERVICE}
    await cluster.attempts(minutes=5)
    assert {kind for kind, _ in cluster.requests} == {"Service"}


@pytest.mark.parametrize("first", [True, False])
async def test_a_refused_head_is_retried_once_a_minute(first: bool) -> None:
    """The Job of its workers comes first, and takes a new number each time."""
    head = {"nodeResources": {"gpus": 0, "cpus": 2, "memory": "8Gi"}}
    cluster = Cluster(World(make_job(numNodes=3, head=head), make_queue()))
    world = cluster.world
    if not first:
        world.settle_twice()
        world.all_workers("Running")
        world.settle()
        world.all_workers("Failed")
    cluster.refuses = {("Job", name) for name in ("train", *(f"train-r{n}" for n in range(1, 9)))}
    for _ in range(25):  # 50 s
        await cluster.attempt()
    workers = "train-w" if first else "train-r1-w"
    assert [name for kind, name in cluster.requests if name.endswith("-w")] == [workers, workers]
    assert (world.phase, world.job.status.reason) == ("Pending", "Rejected")
    await cluster.attempts(minutes=3)
    cluster.refuses = set()
    await cluster.attempts(minutes=2)
    assert world.phase == "Queued"


async def test_the_other_write_ends_before_an_error_is_raised() -> None:
    """The server is down for one of two writes. The other one is not interrupted."""
    cluster = starting_cluster()
    cluster.refuses, cluster.fails = set(), {SERVICE}
    with pytest.raises(UnavailableError):
        await cluster.attempt()
    assert (JOBS.plural, "train") in cluster.world.objects
    cluster.fails = set()
    await cluster.attempt()
    assert (SERVICES.plural, "train") in cluster.world.objects


class Taken(Cluster):
    """Other owners have all names of child Jobs."""

    async def apply(self, intent: Apply) -> WriteResult:
        self.requests.append((intent.kind.kind, intent.name))
        if intent.kind is not JOBS:
            return await super().apply(intent)
        raise NameConflictError(Conflict(intent.kind.resource, intent.name, "another's"))


async def test_taken_names_are_skipped_a_few_at_a_time() -> None:
    """An attempt skips numbers whose names are taken, a bounded number at a time."""
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.all_workers("Failed")
    world.pass_backoff()
    cluster = Taken(world)
    assert await cluster.attempt() == RequeueAfter(STATUS_INTERVAL)
    assert len(cluster.requests) == MAX_ROUNDS
    await cluster.attempt()
    assert len(set(cluster.requests)) == len(cluster.requests) == 2 * MAX_ROUNDS
