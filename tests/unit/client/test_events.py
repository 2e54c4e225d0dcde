"""Events do not block a reconcile, repeat as a series, and are rate-limited."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import anyio
import pytest
import structlog

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ObjectMeta
from torchrun_controller.client import ApiError, Disconnected, Response, events
from torchrun_controller.client.events import EventRecorder
from torchrun_controller.reconcile.model.plan import Event
from virtual_time import in_virtual_time

START = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


class Server:
    """Stores Event objects as the API server would."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, object]] = {}
        self.methods: list[str] = []
        self.failure: Exception | None = None
        self.failures: list[Exception] = []  # of the next requests
        self.lost = 0  # errors after the next requests were processed
        self.takes = lambda: None

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = {},
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> Response:
        self.methods.append(method)
        self.takes()
        if self.failure is not None:
            raise self.failure
        if self.failures:
            raise self.failures.pop(0)
        sent = json.loads(body or b"{}")
        name = path.rpartition("/")[2] if method == "PATCH" else sent["metadata"]["name"]
        if method == "PATCH" and name not in self.objects:
            raise ApiError(404, "NotFound", "gone", None, ())
        if method == "POST" and name in self.objects:
            raise ApiError(409, "AlreadyExists", "exists", None, ())
        self.objects.setdefault(name, {}).update(sent)
        if self.lost:
            self.lost -= 1
            raise Disconnected("the answer was lost")
        return Response(201, b"{}")


class Leading:
    def check(self) -> None:
        pass


class World:
    def __init__(self) -> None:
        self.server = Server()
        self.time = 0.0
        self.recorder = EventRecorder(
            self.server,
            Leading(),
            clock=lambda: self.time,
            now=lambda: START + timedelta(seconds=self.time),
            instance="here-1",
        )

    async def say(self, message: str, job: str = "run") -> None:
        self.recorder.record(a_job(job), Event("Warning", "Broken", message))
        await self.written()

    async def written(self, seconds: float = 5) -> None:
        self.recorder.shut_down(seconds)
        with anyio.fail_after(60):
            await self.recorder.run()

    @property
    def objects(self) -> list[dict[str, object]]:
        return list(self.server.objects.values())


@pytest.fixture
def world() -> World:
    return World()


def a_job(name: str = "run") -> TorchrunJob:
    return TorchrunJob(metadata=ObjectMeta(name=name, namespace="team", uid=f"uid-{name}"))


async def test_the_shape_of_an_event(world: World) -> None:
    await world.say("it broke")
    (event,) = world.objects
    metadata = event.pop("metadata")
    assert isinstance(metadata, dict)
    assert metadata["name"].startswith("run.")
    assert metadata["namespace"] == "team"
    assert event == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "eventTime": "2026-01-02T03:04:05.000678Z",
        "reportingController": "torchrun.ai/controller",
        "reportingInstance": "here-1",
        "action": "Reconcile",
        "type": "Warning",
        "reason": "Broken",
        "note": "it broke",
        "regarding": {
            "apiVersion": "torchrun.ai/v1alpha1",
            "kind": "TorchrunJob",
            "namespace": "team",
            "name": "run",
            "uid": "uid-run",
        },
    }


async def test_a_repetition_becomes_a_series(world: World) -> None:
    for _ in range(3):
        await world.say("it broke")
        world.time += 10
    (event,) = world.objects
    assert event["series"] == {"count": 3, "lastObservedTime": "2026-01-02T03:04:25.000678Z"}
    assert world.server.methods == ["POST", "PATCH", "PATCH"]


async def test_waiting_repetitions_are_written_once(world: World) -> None:
    for _ in range(3):
        world.recorder.record(a_job(), Event("Warning", "Broken", "it broke"))
    await world.written()
    (event,) = world.objects
    assert world.server.methods == ["POST"]
    assert event["series"] == {"count": 3, "lastObservedTime": "2026-01-02T03:04:05.000678Z"}


async def test_another_message_job_or_time_is_another_event(world: World) -> None:
    await world.say("it broke")
    await world.say("it broke again")
    await world.say("it broke", job="other")
    world.time += events.WINDOW
    await world.say("it broke")
    assert len(world.objects) == 4
    assert not any("series" in event for event in world.objects)


async def test_a_series_whose_event_has_expired_starts_again(world: World) -> None:
    await world.say("it broke")
    world.server.objects.clear()
    await world.say("it broke")
    (event,) = world.objects
    assert event["series"]["count"] == 2  # type: ignore[index]


async def test_a_storm_of_events_is_limited_for_its_own_job(world: World) -> None:
    for number in range(100):
        await world.say(f"broken {number}")
    assert len(world.objects) == events.RATE.burst
    await world.say("another job", job="other")
    assert len(world.objects) == events.RATE.burst + 1
    world.time += 300
    await world.say("one more after five minutes")
    await world.say("and not two")
    assert len(world.objects) == events.RATE.burst + 2


async def test_a_long_message_is_cut_to_the_servers_limit(world: World) -> None:
    await world.say("ä" * 2000)
    (event,) = world.objects
    note = event["note"]
    assert isinstance(note, str)
    assert len(note.encode()) <= 1024
    assert note.endswith("ä...")


@pytest.mark.parametrize(
    ("failure", "level"),
    [(ApiError(403, "Forbidden", "no", None, ()), "warning"), (Disconnected("x"), "debug")],
    ids=["forbidden", "disconnected"],
)
async def test_a_failing_server_drops_the_event_only(
    world: World, failure: Exception, level: str
) -> None:
    world.server.failure = failure
    with structlog.testing.capture_logs() as lines:
        await world.say("lost")
    assert [line["log_level"] for line in lines] == [level]
    world.server.failure = None
    await world.say("kept")
    assert [event["note"] for event in world.objects] == ["kept"]
    assert world.recorder.dropped == 1


async def test_shutdown_finishes_the_current_write_only(
    world: World,
) -> None:
    def slow() -> None:
        world.time += 0.6

    world.server.takes = slow
    for message in ("one", "two", "three"):
        world.recorder.record(a_job(), Event("Normal", "Started", message))
    await world.written(seconds=1.0)
    assert [event["note"] for event in world.objects] == ["one", "two"]


async def test_shutdown_while_it_waits_for_an_event(world: World) -> None:
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.recorder.run)
            await anyio.lowlevel.checkpoint()
            world.recorder.shut_down(1.0)


async def test_the_queue_is_bounded_and_drops_the_oldest(world: World) -> None:
    for number in range(events.MAX_QUEUED + 5):
        world.recorder.record(a_job(f"job-{number}"), Event("Normal", "Started", "running"))
    await world.written()
    assert len(world.objects) == events.MAX_QUEUED
    assert world.recorder.dropped == 5
    names = {event["regarding"]["name"] for event in world.objects}  # type: ignore[index]
    assert "job-4" not in names
    assert f"job-{events.MAX_QUEUED + 4}" in names


async def test_memory_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_SERIES", 10)
    for number in range(50):
        await world.say("hello", job=f"job-{number}")
    await world.say("hello", job="job-49")
    assert len(world.objects) == 50, "the newest series are in memory"
    await world.say("hello", job="job-0")
    assert len(world.objects) == 51, "the oldest series are dropped"


async def test_expired_series_are_forgotten(world: World) -> None:
    for number in range(50):
        await world.say("hello", job=f"job-{number}")
    world.time += max(events.WINDOW, 1 / events.RATE.per_second) + 1
    await world.say("hello", job="job-50")
    assert len(world.recorder._series) == 1
    assert len(world.recorder._buckets) == 1


async def test_run_writes_events_as_they_arrive(world: World) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.recorder.run)
        for number in range(3):
            world.recorder.record(a_job(), Event("Normal", "Started", f"attempt {number}"))
            with anyio.fail_after(60):
                while len(world.objects) <= number:
                    await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


def busy(retry_after: float | None = None) -> ApiError:
    return ApiError(503, "ServiceUnavailable", "later", retry_after)


async def waited(world: World) -> float:
    """Seconds until the queue is empty."""
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.recorder.run)
        while world.recorder._queue or anyio.current_time() < began + 0.1:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()
    return anyio.current_time() - began


@in_virtual_time
async def test_a_lost_response_creates_one_event_that_continues_to_count() -> None:
    world = World()
    world.server.lost = 1
    for _ in range(3):
        world.recorder.record(a_job(), Event("Warning", "Broken", "it broke"))
        await waited(world)
    (event,) = world.objects
    assert event["series"]["count"] == 3  # type: ignore[index]
    assert world.server.methods == ["POST", "POST", "PATCH", "PATCH"]
    assert world.recorder.dropped == 0


@in_virtual_time
async def test_a_repetition_during_the_request_counts() -> None:
    world = World()
    world.server.lost = 1
    again = [True]

    def repeat() -> None:
        if again:
            again.pop()
            world.recorder.record(a_job(), Event("Warning", "Broken", "it broke"))

    world.server.takes = repeat
    world.recorder.record(a_job(), Event("Warning", "Broken", "it broke"))
    await waited(world)
    (event,) = world.objects
    assert event["series"]["count"] == 2  # type: ignore[index]
    assert world.recorder.dropped == 0


@in_virtual_time
@pytest.mark.parametrize("failure", [busy(), busy(5), ApiError(429, "", ""), Disconnected("reset")])
async def test_a_short_outage_loses_no_event(failure: Exception) -> None:
    world = World()
    world.server.failures = [failure] * 3
    for message in ("one", "two"):
        world.recorder.record(a_job(), Event("Warning", "Broken", message))
    seconds = await waited(world)
    assert [event["note"] for event in world.objects] == ["one", "two"], "in their order"
    retry_after = isinstance(failure, ApiError) and failure.retry_after
    assert seconds == pytest.approx(15 if retry_after else 7, abs=0.3)
    assert world.recorder.dropped == 0


@in_virtual_time
async def test_an_event_that_always_fails_is_dropped() -> None:
    world = World()
    world.server.failures = [busy()] * events.MAX_TRIES
    for message in ("poison", "other"):
        world.recorder.record(a_job(), Event("Warning", "Broken", message))
    assert await waited(world) < 120
    assert [event["note"] for event in world.objects] == ["other"]
    assert world.recorder.dropped == 1


@in_virtual_time
async def test_shutdown_does_not_wait_for_an_unreachable_server() -> None:
    world = World()
    world.server.failure = busy(600)
    world.recorder.record(a_job(), Event("Warning", "Broken", "lost"))
    with anyio.fail_after(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.recorder.run)
            await anyio.sleep(1)
            world.recorder.shut_down(1.0)
    assert world.server.methods == ["POST", "POST"], "one more request at most"
