"""The reconciler of queues: trials, refusals, and the rate of status updates."""

from collections.abc import Callable
from datetime import datetime

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from queue_world import make_trq
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_api.kinds.resources import JOBS, KAI_QUEUES, SERVICES, TORCHRUN_QUEUES
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import WriteResult
from torchrun_controller.client.write_errors import (
    NameConflictError,
    RejectedError,
    SupersededError,
    UnavailableError,
)
from torchrun_controller.controllers.controller import Behind, Done, RequeueAfter
from torchrun_controller.controllers.queue import REFUSED_RETRY, QueueReconciler
from torchrun_controller.controllers.writes import Writes
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.model.observed import Conflict, Rejection
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event
from torchrun_controller.reconcile.queue import ObservedQueue, QueuePlan, TemplateCheck
from unit.controllers.neighbours import NOW, Cache

KEY = ("ml", "gpu")
TRIAL = Apply(JOBS, {"metadata": {"name": "template", "namespace": "ml"}})
SETTINGS = Apply(SERVICES, {"metadata": {"name": "settings", "namespace": "ml"}})
OTHER = Apply(SERVICES, {"metadata": {"name": "other", "namespace": "ml"}})
GONE = Delete(kind=KAI_QUEUES, namespace="", name="training", uid="u")
CHANGED = Event("Normal", "QueueChanged", "later")
ACTIVE = TorchrunQueueStatus(phase="Active")


def rejected(*, permanent: bool) -> RejectedError:
    return RejectedError(Rejection("jobs.batch", "template", "not so"), permanent=permanent)


class World:
    """A reconciler between fakes."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.cache = Cache()
        self.queue: TorchrunQueue | None = make_trq()
        self.plan: Callable[[ObservedQueue], QueuePlan] = lambda _: QueuePlan()
        self.observations: list[ObservedQueue] = []
        self.log: list[object] = []
        self.events: list[Event] = []
        self.failures: dict[str, Exception] = {}  # by the name of the object
        own: Expectations[tuple[str, str]] = Expectations(
            lambda _: {"services": self.cache, TORCHRUN_QUEUES.resource: self.cache}, self.clock
        )
        self.reconciler = QueueReconciler(
            observe=self.observe,
            decide=self.decide,
            applier=self,
            writes=Writes(self, own, Metrics(CollectorRegistry()), self.clock),
            events=self,
            clock=self.clock,
            now=lambda: NOW,
        )

    def clock(self) -> float:
        return self.time

    def observe(self, namespace: str, name: str) -> ObservedQueue | None:
        return None if self.queue is None else ObservedQueue(queue=self.queue)

    def decide(self, observed: ObservedQueue, now: datetime) -> QueuePlan:
        assert now == NOW
        self.observations.append(observed)
        return self.plan(observed)

    async def dry_run(self, intent: Apply) -> None:
        self._write(intent.name, intent)

    async def apply(self, intent: Apply) -> WriteResult:
        self._write(intent.name, intent)
        return WriteResult(intent.kind, intent.name, "u", "5")

    async def delete(self, delete: Delete) -> WriteResult | None:
        self._write(delete.name, delete)
        return None

    async def apply_status(
        self, owner: TorchrunQueue, status: TorchrunQueueStatus
    ) -> WriteResult | None:
        self._write("status", status)
        return None

    def record(self, about: TorchrunQueue, event: Event) -> None:
        assert about == self.queue
        self.events.append(event)

    def _write(self, name: str, what: object) -> None:
        if name in self.failures:
            raise self.failures[name]
        self.log.append(what)


@pytest.fixture
def world() -> World:
    return World()


async def test_the_writes_of_a_plan_keep_their_order(world: World) -> None:
    world.plan = lambda _: QueuePlan(
        applies=(SETTINGS,), deletes=(GONE,), status=ACTIVE, events=(CHANGED,)
    )
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == [SETTINGS, GONE, ACTIVE]
    assert world.events == [CHANGED]
    assert isinstance(await world.reconciler.attempt(KEY), Behind)


async def test_a_deleted_queue_is_forgotten(world: World) -> None:
    world.queue = None
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.observations == []


async def test_a_status_follows_the_finalizer_once_the_cache_shows_it(world: World) -> None:
    hold = Apply(TORCHRUN_QUEUES, {"metadata": {"name": "gpu", "namespace": "ml"}}, "uid")
    world.plan = lambda _: QueuePlan(applies=(hold,), status=ACTIVE)
    assert await world.reconciler.attempt(KEY) == RequeueAfter(1)
    assert world.log == [hold], "a status of the old resourceVersion would be refused"
    world.cache.resource_version = 100
    world.plan = lambda _: QueuePlan(status=ACTIVE)
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == [hold, ACTIVE]


class TestTrials:
    """A template is tried once, and the next reconcile sees the result."""

    @pytest.mark.parametrize(
        ("failure", "accepted"),
        [
            (None, "True"),
            (rejected(permanent=True), "False"),
            (rejected(permanent=False), "Unknown"),
            (NameConflictError(Conflict("jobs.batch", "template", "taken")), "Unknown"),
            (SupersededError("replaced"), "Unknown"),
            (ApiError(404, "NotFound", "no namespace"), "Unknown"),
        ],
        ids=str,
    )
    async def test_results_of_a_trial(
        self, world: World, failure: Exception | None, accepted: str
    ) -> None:
        world.plan = lambda seen: QueuePlan(trial=TRIAL if seen.template_check is None else None)
        if failure is not None:
            world.failures = {"template": failure}
        good = accepted == "True"
        assert await world.reconciler.attempt(KEY) == (
            Done() if good else RequeueAfter(REFUSED_RETRY)
        )
        verdict = world.observations[-1].template_check
        assert verdict is not None
        assert (verdict.generation, verdict.accepted) == (1, accepted)
        assert verdict.message == ("" if failure is None else str(failure))
        await world.reconciler.attempt(KEY)
        assert len(world.observations) == 3, "the result is stored"
        world.failures = {}
        world.time += REFUSED_RETRY
        assert await world.reconciler.attempt(KEY) == Done()
        assert len(world.observations) == (4 if good else 5), (
            "a policy may have changed since the refusal"
        )
        assert world.observations[-1].template_check == TemplateCheck(1, "True")

    async def test_no_response_is_no_result_of_a_trial(self, world: World) -> None:
        world.plan = lambda seen: QueuePlan(trial=TRIAL)
        world.failures = {"template": UnavailableError("503")}
        with pytest.raises(UnavailableError):
            await world.reconciler.attempt(KEY)

    async def test_a_changed_spec_is_tried_again(self, world: World) -> None:
        world.plan = lambda seen: QueuePlan(trial=TRIAL if seen.template_check is None else None)
        await world.reconciler.attempt(KEY)
        assert world.queue is not None
        world.queue = replace(world.queue, metadata=replace(world.queue.metadata, generation=2))
        await world.reconciler.attempt(KEY)
        assert world.observations[-1].template_check == TemplateCheck(2, "True")
        assert world.log == [TRIAL, TRIAL]


class TestRefusals:
    """A refused object does not affect the others."""

    @staticmethod
    def insisting(seen: ObservedQueue) -> QueuePlan:
        """A Plan like that of reconcile: it reports a refused object and does not write it."""
        applies = tuple(
            intent
            for intent in (SETTINGS, OTHER)
            if (intent.kind.resource, intent.name) not in seen.refused
        )
        message = "; ".join(seen.refused.values())
        status = TorchrunQueueStatus(phase="Updating" if message else "Active")
        return QueuePlan(applies=applies, status=status)

    @pytest.mark.parametrize(
        "failure",
        [
            NameConflictError(Conflict("services", "settings", "not so")),
            rejected(permanent=True),
            ApiError(403, "Forbidden", "not so"),
        ],
        ids=str,
    )
    async def test_a_refused_object_is_reported_and_the_others_are_created(
        self, world: World, failure: Exception
    ) -> None:
        world.plan, world.failures = self.insisting, {"settings": failure}
        assert await world.reconciler.attempt(KEY) == RequeueAfter(REFUSED_RETRY)
        assert world.log == [OTHER, TorchrunQueueStatus(phase="Updating")]
        assert world.observations[-1].refused == {("services", "settings"): "not so"}

    async def test_a_refused_object_is_tried_again_after_a_minute(self, world: World) -> None:
        world.plan, world.failures = self.insisting, {"settings": rejected(permanent=True)}
        await world.reconciler.attempt(KEY)
        world.cache.resource_version, world.failures = 100, {}
        world.time += REFUSED_RETRY - 1
        assert await world.reconciler.attempt(KEY) == RequeueAfter(1)
        assert SETTINGS not in world.log
        world.time += 1
        assert await world.reconciler.attempt(KEY) == Done()
        assert SETTINGS in world.log

    async def test_a_changed_spec_is_tried_at_once(self, world: World) -> None:
        world.plan, world.failures = self.insisting, {"settings": rejected(permanent=True)}
        await world.reconciler.attempt(KEY)
        world.cache.resource_version, world.failures = 100, {}
        assert world.queue is not None
        world.queue = replace(world.queue, metadata=replace(world.queue.metadata, generation=2))
        await world.reconciler.attempt(KEY)
        assert SETTINGS in world.log

    async def test_an_unavailable_server_is_no_refusal(self, world: World) -> None:
        world.plan, world.failures = self.insisting, {"settings": UnavailableError("503")}
        with pytest.raises(UnavailableError):
            await world.reconciler.attempt(KEY)
        assert world.log == []


async def test_counts_are_written_once_a_second_and_phases_at_once(world: World) -> None:
    assert world.queue is not None
    world.queue = replace(world.queue, status=ACTIVE)
    world.plan = lambda _: QueuePlan(status=ACTIVE, events=(CHANGED,))
    await world.reconciler.attempt(KEY)
    world.time += 0.25
    assert await world.reconciler.attempt(KEY) == RequeueAfter(0.75)
    assert world.events == [CHANGED], "the event waits with its status"
    world.plan = lambda _: QueuePlan(status=TorchrunQueueStatus(phase="Terminating"))
    assert await world.reconciler.attempt(KEY) == Done()
    assert len(world.log) == 2


async def test_a_failed_status_is_retried_with_the_backoff_of_its_queue(world: World) -> None:
    assert world.queue is not None
    world.queue = replace(world.queue, status=ACTIVE)
    world.plan = lambda _: QueuePlan(status=ACTIVE)
    world.failures = {"status": ApiError(422, "Invalid", "status.message: Too long")}
    for _ in range(3):
        with pytest.raises(ApiError, match="Too long"):
            await world.reconciler.attempt(KEY)
    world.failures = {}
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == [ACTIVE]
