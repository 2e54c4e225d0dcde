"""A refused write affects its own object only, not the status or the rest of the job."""

from collections.abc import Iterable
from typing import Any

import pytest

from shell_world import ShellWorld
from torchrun_api.kinds.core import Job
from torchrun_api.kinds.meta import ChildMeta
from torchrun_api.kinds.resources import JOBS, NETWORK_POLICIES, PODS, SERVICES, TORCHRUN_JOBS
from torchrun_controller.client.write_errors import UnavailableError
from torchrun_controller.controllers.controller import FORBIDDEN_RETRY, RequeueAfter
from torchrun_controller.controllers.job import MAX_PLANS
from torchrun_controller.controllers.writes import STATUS_INTERVAL
from world import START, make_job, make_queue

QUOTA = "exceeded quota: few"
NO_ANSWER = 'failed calling webhook "w.example.com": connection refused'
SERVICE = SERVICES.path("ml", "train")


def job(name: str) -> str:
    return JOBS.path("ml", name)


def pod(name: str) -> str:
    return PODS.path("ml", name)


def refuse(
    world: ShellWorld,
    *paths: str,
    method: str = "PATCH",
    answer: tuple[int, str] = (403, QUOTA),
) -> None:
    """The API server refuses these requests, and accepts all others."""
    world.api.refused = {(method, path): answer for path in paths}


def attempts(world: ShellWorld, minutes: int) -> None:
    """Run one attempt each minute, like the requeue after a refusal."""
    for _ in range(minutes):
        world.attempt()
        world.pass_time(minutes=1)


def written(world: ShellWorld, method: str = "PATCH") -> list[str]:
    """The paths of the objects that were sent, without the status."""
    requests = (str(entry.get("request", "")).partition("?")[0] for entry in world.api.recorded)
    sent = (request.split() for request in requests if request.startswith(method))
    return [path for _, path in sent if not path.endswith("/status")]


def events(world: ShellWorld) -> Iterable[str]:
    return [str(entry["event"]) for entry in world.api.recorded if "event" in entry]


def running(**spec: Any) -> ShellWorld:
    """A gang of two runs, and the controller is about to see it."""
    world = ShellWorld(make_job(numNodes=2, **spec), make_queue())
    world.settle()
    world.all_workers("Running")
    world.api.take()
    return world


def without_service(**spec: Any) -> ShellWorld:
    """A running gang of two. Its Service was deleted and cannot be created again."""
    world = running(**spec)
    del world.objects[SERVICES.plural, "train"]
    refuse(world, SERVICE)
    return world


def test_a_running_gang_has_a_status_despite_refusals() -> None:
    world = without_service()
    assert world.attempt() == RequeueAfter(FORBIDDEN_RETRY)
    assert world.phase == "Running"
    warning = world.condition("WritesAccepted")
    assert (warning.status, warning.reason) == ("False", "Rejected")
    assert "services train: exceeded quota: few" in warning.message
    assert [event.partition(":")[0] for event in events(world) if "Warning" in event] == [
        "Warning Rejected"
    ]


def test_a_refused_write_is_retried_and_warned_of_once_a_minute() -> None:
    world = without_service()
    for _ in range(50):
        world.attempt()
    assert written(world).count(SERVICE) == 2
    refuse(world)
    world.pass_time(minutes=1)
    world.attempt()
    world.attempt()
    assert (SERVICES.plural, "train") in world.objects
    assert "WritesAccepted" not in {c.type for c in world.job.status.conditions}


def test_a_refused_write_and_the_deadline() -> None:
    world = without_service(reliability={"activeDeadlineSeconds": 90})
    attempts(world, minutes=3)
    assert world.phase == "TimedOut"
    assert (world.job.status.completion_time - START).total_seconds() == 120


def test_a_failed_webhook_and_the_deadline() -> None:
    """The API server answers 500 to one kind of object only, for hours."""
    world = without_service(reliability={"activeDeadlineSeconds": 90})
    refuse(world, SERVICE, answer=(500, NO_ANSWER))
    assert world.attempt() == RequeueAfter(FORBIDDEN_RETRY)
    assert world.phase == "Running"
    assert f"services train: {NO_ANSWER}" in world.condition("WritesAccepted").message
    assert written(world) == [SERVICE], "the write is sent once in an attempt"
    world.attempt()
    attempts(world, minutes=3)
    assert world.phase == "TimedOut"


def test_a_failed_webhook_and_a_restart() -> None:
    """A webhook for Jobs is away while a gang fails. The failure is recorded, and no gang lost."""
    world = without_service(reliability={"maxRestarts": 2})
    refuse(world, job("train-r1"), answer=(500, NO_ANSWER))
    world.attempt()
    world.all_workers("Failed")
    attempts(world, minutes=2)
    assert (world.phase, world.job.status.reason) == ("Pending", "Rejected")
    assert NO_ANSWER in world.job.status.message
    assert [attempt.counted for attempt in world.job.status.attempts] == [True]
    refuse(world)
    world.pass_time(minutes=1)
    world.attempt()
    assert (len(world.gangs), world.job.status.restarts) == (2, 1)
    world.attempt()
    assert "WritesAccepted" not in {c.type for c in world.job.status.conditions}


def test_a_failed_webhook_for_pods_does_not_hide_the_end_of_the_job() -> None:
    world = without_service(reliability={"maxRestarts": 0})
    refuse(world)
    world.attempt()
    first, second = (pod.metadata.name for pod in world.workers())
    world.pod(first, phase="Failed")
    refuse(world, pod(second), method="DELETE", answer=(500, NO_ANSWER))
    world.attempt()
    assert world.phase == "Failed"
    assert f"delete pods {second}" in world.condition("WritesAccepted").message


def test_a_refused_write_and_a_suspension() -> None:
    world = without_service()
    world.attempt()
    world.spec(suspend=True)
    world.attempt()
    assert (JOBS.plural, "train") not in world.objects
    world.containers_stop()
    world.attempt()
    assert world.phase == "Suspended"
    # The next gang needs the Service. It waits, and the message says so.
    world.spec(suspend=False)
    world.attempt()
    assert (world.phase, world.job.status.reason) == ("Pending", "Rejected")
    assert len(world.gangs) == 1
    refuse(world)
    world.pass_time(minutes=1)
    world.attempt()
    assert len(world.gangs) == 2


def test_a_refused_write_and_a_restart() -> None:
    """The end of the gang is recorded. The next one starts when all of its objects are accepted."""
    world = without_service(reliability={"maxRestarts": 2})
    world.attempt()
    world.all_workers("Failed")
    attempts(world, minutes=2)
    status = world.job.status
    assert (status.phase, status.reason, len(world.gangs)) == ("Pending", "Rejected", 1)
    assert [attempt.counted for attempt in status.attempts] == [True]
    refuse(world)
    world.pass_time(minutes=1)
    world.attempt()
    assert (len(world.gangs), world.job.status.restarts) == (2, 1)
    assert (SERVICES.plural, "train") in world.objects


def test_each_refusal_is_named_and_concerns_its_own_object() -> None:
    world = without_service(reliability={"maxRestarts": 2})
    refuse(world)
    world.attempt()
    world.pod("train-0-abcde", phase="Failed")
    world.pass_backoff()
    world.attempt()
    assert len(world.gangs) == 2
    world.containers_stop()
    world.all_workers("Running")
    del world.objects[SERVICES.plural, "train"]
    refuse(world, SERVICE, pod("train-r1-0-abcde"))
    world.attempt()
    message = world.condition("WritesAccepted").message
    assert "services train" in message
    assert "pods train-r1-0-abcde" in message
    assert world.phase == "Queued", "workers whose leader has no start annotation do not run"
    refuse(world, SERVICE)
    world.pass_time(minutes=1)
    world.attempt()
    world.attempt()
    assert world.phase == "Running"


def test_a_forbidden_pod_delete_does_not_hide_the_end_of_the_job() -> None:
    world = without_service(reliability={"maxRestarts": 0})
    refuse(world)
    world.attempt()
    first, second = (pod.metadata.name for pod in world.workers())
    world.pod(first, phase="Failed")
    refuse(world, pod(second), method="DELETE")
    world.attempt()
    assert world.phase == "Failed"
    assert f"delete pods {second}" in world.condition("WritesAccepted").message
    assert any(event.startswith("Warning Forbidden") for event in events(world))
    world.attempt()
    assert written(world, "DELETE").count(pod(second)) == 1
    refuse(world)
    world.pass_time(minutes=1)
    world.attempt()
    world.containers_stop()
    world.attempt()
    assert (PODS.plural, second) not in world.objects
    assert "WritesAccepted" not in {c.type for c in world.job.status.conditions}


def test_a_forbidden_job_delete_is_shown_while_the_suspension_waits() -> None:
    world = without_service()
    refuse(world)
    world.attempt()
    refuse(world, job("train"), method="DELETE")
    world.spec(suspend=True)
    assert world.attempt() == RequeueAfter(1.0)
    world.attempt()
    assert world.job.status.reason == "Suspending"
    assert "delete jobs.batch train" in world.condition("WritesAccepted").message
    assert written(world, "DELETE").count(job("train")) == 1


def test_a_gang_is_never_created_without_its_objects() -> None:
    world = ShellWorld(make_job(numNodes=2), make_queue(networking={"isolate": True}))
    policy = NETWORK_POLICIES.path("ml", "train")
    refuse(world, policy)
    attempts(world, minutes=5)
    assert set(written(world)) == {policy}
    assert (world.phase, world.gangs) == ("Pending", [])


def starting() -> ShellWorld:
    """A new job of two nodes, whose Service is refused while its Job is created."""
    world = ShellWorld(make_job(numNodes=2), make_queue())
    refuse(world, SERVICE)
    return world


def test_a_first_gang_waits_for_its_service() -> None:
    world = starting()
    for _ in range(3):
        world.attempt()
        status = world.job.status
        assert (status.phase, status.reason) == ("Pending", "Rejected")
        assert "services train: exceeded quota: few" in status.message
        world.all_workers("Running")
    assert world.condition("Running").reason == "Rejected"
    assert world.condition("Running").status == "False"
    assert world.job.status.start_time is None, "no rank runs"
    assert world.job.status.workers.running == 2
    assert written(world) == [job("train"), SERVICE], "the refused write is not repeated"
    refuse(world)
    world.pass_time(minutes=1)
    world.attempt()
    world.attempt()
    assert world.phase == "Running"
    assert written(world) == [job("train"), SERVICE, SERVICE]
    assert (world.job.status.attempt, world.job.status.attempts) == (0, ())


def test_a_new_process_waits_for_the_service_of_a_gang_that_it_does_not_know() -> None:
    world = starting()
    status = TORCHRUN_JOBS.path("ml", "train", "status")
    world.api.refused["PATCH", status] = (503, "the server is down")
    with pytest.raises(UnavailableError):
        world.attempt()
    assert world.job.status.workers is None
    world.restart()
    world.api.take()
    refuse(world, SERVICE)
    for _ in range(2):
        world.attempt()
        assert (world.phase, world.job.status.reason) == ("Pending", "Rejected")
    assert written(world) == [SERVICE]


def test_a_gang_that_waits_for_its_service_can_be_suspended() -> None:
    world = starting()
    attempts(world, minutes=2)
    world.spec(suspend=True)
    world.attempt()
    world.containers_stop()
    world.attempt()
    assert world.phase == "Suspended"
    assert (JOBS.plural, "train") not in world.objects
    world.spec(suspend=False)
    attempts(world, minutes=2)
    assert (world.phase, len(world.gangs)) == ("Pending", 1), "the next one comes after its Service"


def test_a_job_that_fails_while_its_service_is_refused_ends() -> None:
    world = without_service(reliability={"maxRestarts": 0})
    world.all_workers("Failed")
    world.attempt()
    assert world.phase == "Failed"


def test_no_job_of_a_head_is_created_without_the_service() -> None:
    world = ShellWorld(make_job(numNodes=2, head={"nodeResources": {"cpus": 2}}), make_queue())
    refuse(world, SERVICE)
    attempts(world, minutes=5)
    assert set(written(world)) == {SERVICE}


@pytest.mark.parametrize("first", [True, False])
def test_a_refused_head_is_retried_once_a_minute(first: bool) -> None:
    """The Job of its workers comes first, and takes a new number each time."""
    head = {"nodeResources": {"gpus": 0, "cpus": 2, "memory": "8Gi"}}
    world = ShellWorld(make_job(numNodes=3, head=head), make_queue())
    if not first:
        world.settle_twice()
        world.all_workers("Running")
        world.settle()
        world.all_workers("Failed")
    world.api.take()
    refuse(world, *map(job, ("train", *(f"train-r{n}" for n in range(1, 9)))))
    for _ in range(25):  # 50 s
        world.attempt()
    workers = job("train-w" if first else "train-r1-w")
    assert [path for path in written(world) if path.endswith("-w")] == [workers]
    assert written(world, "DELETE") == [workers]
    assert (world.phase, world.job.status.reason) == ("Pending", "Rejected")
    attempts(world, minutes=3)
    refuse(world)
    attempts(world, minutes=2)
    assert world.phase == "Queued"


def test_the_other_write_ends_before_an_error_is_raised() -> None:
    """The server is down for one of two writes. The other one is not interrupted."""
    world = starting()
    refuse(world, SERVICE, answer=(503, "the server is down"))
    with pytest.raises(UnavailableError):
        world.attempt()
    assert (JOBS.plural, "train") in world.objects
    refuse(world)
    world.attempt()
    assert (SERVICES.plural, "train") in world.objects


class Taken(ShellWorld):
    """Other owners may have all other names of child Jobs."""

    has_foreign = False

    def stored(self, plural: str, name: str) -> Any:
        """See `ShellWorld.stored`."""
        found = super().stored(plural, name)
        if found is None and self.has_foreign and plural == JOBS.plural:
            return Job(metadata=ChildMeta(name=name, uid="uid-other", resource_version="1"))
        return found


def test_taken_names_are_skipped_a_few_at_a_time() -> None:
    """An attempt skips numbers whose names are taken, a bounded number at a time."""
    world = Taken(make_job(numNodes=1), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.all_workers("Failed")
    world.pass_backoff()
    world.has_foreign = True
    world.api.take()
    assert world.attempt() == RequeueAfter(STATUS_INTERVAL)
    assert len(written(world)) == MAX_PLANS
    world.attempt()
    assert len(set(written(world))) == len(written(world)) == 2 * MAX_PLANS
