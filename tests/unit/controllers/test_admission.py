"""The key of admission: no node is promised twice, even if writes fail."""

import asyncio
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from torchrun_api.admission import Admission
from torchrun_api.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds import UserObject, kind_of
from torchrun_api.meta import ObjectMeta
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.cache.admission_view import ObservedAdmission
from torchrun_controller.client import ApiError, apply
from torchrun_controller.client.apply import Status, SupersededError, UnavailableError, WriteResult
from torchrun_controller.controllers.admission import (
    BEHIND_RETRY,
    CONFIRM_TIMEOUT,
    FIELD_MANAGER,
    MAX_REPORTS,
    MIN_DELAY,
    AdmissionReconciler,
)
from torchrun_controller.controllers.controller import Behind, Done, RequeueAfter
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.admission.classify import Classification
from torchrun_controller.reconcile.admission.inputs import ClassifiedJob
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    Grant,
    PendingStatus,
    Preemption,
    QueueSummary,
    RoundRobinState,
    Workload,
)
from torchrun_controller.reconcile.model.plan import Event

KEY = "all queues"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
QUEUE = TorchrunQueue(metadata=ObjectMeta(name="lab", namespace="t", uid="q", resource_version="9"))


class World:
    """An API server with jobs and one queue, and a cache that follows at `catch_up`."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.server: dict[str, UserObject] = {"q": QUEUE}
        self.cached: dict[str, UserObject] = {}
        self.held: dict[str, int] = defaultdict(int)
        self.decisions = Decisions()
        self.decided = 0
        self.log: list[str] = []
        self.statuses: dict[str, Status] = {}
        self.events: list[Event] = []
        self.failures: dict[str, list[tuple[Exception, bool]]] = defaultdict(list)
        self.newest = 100
        self.nodes_known = True
        self.next_lost_node: float | None = None
        self.metrics = Metrics(CollectorRegistry())
        self.accounts: list[tuple[QueueSummary, ...]] = []
        self.reconciler = AdmissionReconciler(
            view=self,
            decide=self.decide,
            applier=self,
            events=self,
            metrics=self.metrics,
            account=self.accounts.append,
            clock=lambda: self.time,
            now=lambda: NOW,
        )

    def job(self, name: str, *, held: int = 0) -> None:
        admission = Admission(nodes=held, time=NOW) if held else None
        meta = ObjectMeta(name=name, namespace="t", uid=name, resource_version=str(self._next()))
        job = TorchrunJob(metadata=meta, spec=TorchrunJobSpec(job_queue="lab"))
        status = replace(job.status, admission=admission)
        self.server[name] = replace(job, status=status)
        self.held[name] = held
        self.catch_up()

    def catch_up(self) -> None:
        self.cached = dict(self.server)

    def decide(self, state: ClusterState, now: datetime) -> Decisions:
        self.decided += 1
        return self.decisions

    def observe(self, now: datetime) -> ObservedAdmission | None:
        if not self.nodes_known:
            return None
        jobs = [o for o in self.cached.values() if isinstance(o, TorchrunJob)]
        queues = [o for o in self.cached.values() if isinstance(o, TorchrunQueue)]
        entries = (ClassifiedJob(job, self.classification(job)) for job in jobs)
        return ObservedAdmission(
            state=ClusterState(),
            entries=tuple(entries),
            queues=tuple(queues),
            next_lost_node=self.next_lost_node,
        )

    def classification(self, job: TorchrunJob) -> Classification:
        held = job.status.admission.nodes if job.status.admission else 0
        meta = job.metadata
        workload = Workload(
            namespace="t",
            name=meta.name,
            uid=meta.uid,
            queue="lab",
            created=NOW,
            nodes=max(held, 2),
            admitted=held,
            since=NOW if held else None,
        )
        return Classification(workload=workload, takes_part=True)

    def version(self, owner: UserObject) -> str | None:
        found = self.cached.get(owner.metadata.uid)
        return found.metadata.resource_version if found is not None else None

    async def apply_status(
        self, owner: UserObject, status: Status, manager: str = ""
    ) -> WriteResult | None:
        assert manager == FIELD_MANAGER
        uid = owner.metadata.uid
        failures = self.failures[uid]
        error, carried_out = failures.pop(0) if failures else (None, True)
        present = self.server.get(uid)
        if present is None:
            return None
        if present.metadata.resource_version != owner.metadata.resource_version:
            raise SupersededError("changed meanwhile")
        if carried_out:
            meta = replace(present.metadata, resource_version=str(self._next()))
            self.server[uid] = replace(present, metadata=meta, status=status)
            self.log.append(uid)
            self.statuses[uid] = status
        if error is not None:
            raise error
        written = self.server[uid].metadata.resource_version
        return WriteResult(kind_of(owner), owner.metadata.name, uid, written)

    def record(self, job: TorchrunJob, event: Event) -> None:
        self.events.append(event)

    def _next(self) -> int:
        self.newest += 1
        return self.newest

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0


@pytest.fixture
def world() -> World:
    return World()


def admit(*names: str) -> Decisions:
    return Decisions(grants=tuple(Grant(uid=name, nodes=2) for name in names))


def test_admission_and_reconcile_own_separate_fields():
    """Server-side apply removes fields that their manager no longer sends."""
    managers = {FIELD_MANAGER, apply.FIELD_MANAGER, apply.STATUS_FIELD_MANAGER}
    assert len(managers) == 3


async def test_no_change_writes_nothing(world: World) -> None:
    world.catch_up()
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == []


async def test_there_are_no_more_tasks_than_writes(world: World) -> None:
    world.job("a")
    world.decisions = admit("a")
    started: list[asyncio.Task[object]] = []

    def count(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[object]:
        started.append(asyncio.Task(coro, loop=loop, **options))
        return started[-1]

    loop = asyncio.get_running_loop()
    loop.set_task_factory(count)
    try:
        await world.reconciler.attempt(KEY)
    finally:
        loop.set_task_factory(None)
    assert world.log
    assert len(started) == len(world.log)


async def test_no_decision_before_nodes_are_listed(world: World) -> None:
    world.nodes_known = False
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    assert world.decided == 0


async def test_releases_are_written_before_admissions(world: World) -> None:
    world.job("new")
    world.job("victim", held=4)
    world.job("smaller", held=4)
    world.job("head")
    world.decisions = Decisions(
        grants=(Grant(uid="new", nodes=2), Grant(uid="smaller", nodes=1)),
        preemptions=(
            Preemption(uid="victim", for_uid="head", reason="HigherPriority", message="for head"),
        ),
        pending={"head": PendingStatus("Preempting", "room is made", 1, True)},
        queues=(
            QueueSummary(
                namespace="t", name="lab", round_robin=RoundRobinState(weight=1, current=3)
            ),
        ),
    )
    with structlog.testing.capture_logs() as lines:
        assert await world.reconciler.attempt(KEY) == Done()
    events = [(line["event"], line["job"], line["reason"]) for line in lines]
    assert events == [("preempted", "t/victim", "Preempted"), ("admitted", "t/new", "Admitted")]
    assert world.log[0] == "smaller"
    assert world.log[1:] == ["head", "victim", "new", "q"]
    assert [e.reason for e in world.events] == ["Admitted"]
    assert world.value("torchrun_preemptions_total", reason="HigherPriority") == 1
    assert world.value("torchrun_admission_seconds_count") == 1
    ((account,),) = world.accounts
    assert account.round_robin == RoundRobinState(weight=1, current=3)


async def test_a_preemption_counts_even_if_later_writes_fail(
    world: World,
) -> None:
    world.job("new")
    world.job("victim", held=4)
    preempt = Preemption(uid="victim", for_uid="new", reason="Reclaimed", message="for new")
    world.decisions = Decisions(preemptions=(preempt,), grants=(Grant(uid="new", nodes=2),))
    world.failures["new"] = [(SupersededError("changed meanwhile"), False)]
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    assert world.value("torchrun_preemptions_total", reason="Reclaimed") == 1


async def test_a_preemption_that_is_sent_twice_counts_once(world: World) -> None:
    world.job("victim", held=4)
    preempt = Preemption(uid="victim", for_uid="new", reason="Reclaimed", message="for new")
    world.decisions = Decisions(preemptions=(preempt,))
    world.failures["victim"] = [(UnavailableError("no answer"), False)]
    with pytest.raises(UnavailableError):
        await world.reconciler.attempt(KEY)
    assert world.value("torchrun_preemptions_total", reason="Reclaimed") == 0
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    assert world.value("torchrun_preemptions_total", reason="Reclaimed") == 1


async def test_no_decision_before_the_cache_shows_every_write(world: World) -> None:
    world.job("a")
    world.decisions = admit("a")
    await world.reconciler.attempt(KEY)
    for seconds in (1, 60, 200):
        world.time += seconds
        assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    assert world.decided == 1
    world.catch_up()
    await world.reconciler.attempt(KEY)
    assert world.decided == 2


async def test_the_wait_for_a_restored_api_server_is_bounded(world: World) -> None:
    world.job("a")
    world.decisions = admit("a")
    await world.reconciler.attempt(KEY)
    world.time += CONFIRM_TIMEOUT + 1
    await world.reconciler.attempt(KEY)
    assert world.decided == 2


@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_write_without_a_response_is_repeated(world: World, carried_out: bool) -> None:
    world.job("a")
    world.decisions = admit("a")
    world.failures["a"] = [(UnavailableError("no answer"), carried_out)]
    with pytest.raises(UnavailableError):
        await world.reconciler.attempt(KEY)
    world.decisions = Decisions(
        pending={"a": PendingStatus("InsufficientQuota", "now it is another's turn", 1)}
    )
    if carried_out:
        with pytest.raises(SupersededError):
            await world.reconciler.attempt(KEY)
    else:
        assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    assert world.decided == 1
    assert world.log == ["a"]
    world.catch_up()
    await world.reconciler.attempt(KEY)
    assert world.decided == 2


async def test_a_conflict_stops_the_admissions_after_it(
    world: World,
) -> None:
    world.job("smaller", held=4)
    world.job("new")
    cached = world.server["smaller"]
    changed = replace(cached, metadata=replace(cached.metadata, resource_version="7777"))
    world.server["smaller"] = changed
    world.decisions = Decisions(grants=(Grant(uid="new", nodes=2), Grant(uid="smaller", nodes=1)))
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    assert world.log == [], "its nodes are not free yet"
    world.catch_up()
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == ["smaller", "new"]


async def test_a_refused_write_is_not_expected_in_the_cache(world: World) -> None:
    world.job("a")
    world.decisions = admit("a")
    world.failures["a"] = [(ApiError(403, "Forbidden", "no"), False)]
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == ["a"]


@pytest.mark.parametrize("refused", ["a", "q"])
async def test_a_refused_write_does_not_silence_other_jobs(world: World, refused: str) -> None:
    for name in ("a", "b"):
        world.job(name)
    turns = RoundRobinState(weight=1, current=0)
    summary = QueueSummary(namespace="t", name="lab", round_robin=turns, admitted=1)
    waits = {"b": PendingStatus("BehindInQueue", "wait", 1)}
    world.decisions = Decisions(queues=(summary,), grants=admit("a").grants, pending=waits)
    world.failures[refused] = [(ApiError(403, "Forbidden", "no"), False)]
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    assert world.log[-1] == "b"
    assert refused not in world.log


async def test_a_write_to_a_deleted_job_is_no_failure(world: World) -> None:
    world.job("a")
    world.decisions = admit("a")
    del world.server["a"]
    await world.reconciler.attempt(KEY)
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    world.catch_up()
    assert await world.reconciler.attempt(KEY) == Done()


async def test_positions_are_written_in_the_order_of_the_queue(world: World) -> None:
    names = [f"job-{number:04}" for number in range(MAX_REPORTS + 50)]
    for name in names:
        world.job(name)
    waits = {n: PendingStatus("BehindInQueue", "wait", p) for p, n in enumerate(reversed(names), 1)}
    world.decisions = Decisions(pending=waits)
    assert await world.reconciler.attempt(KEY) == RequeueAfter(MIN_DELAY)
    assert set(world.log) == set(names[50:])
    world.catch_up()
    assert await world.reconciler.attempt(KEY) == Done()
    assert len(world.log) == len(names)
    world.catch_up()
    assert await world.reconciler.attempt(KEY) == Done()
    assert len(world.log) == len(names), "nothing is left to write"


@pytest.mark.parametrize(("after", "seconds"), [(0, MIN_DELAY), (7, 7)])
async def test_deadlines_come_from_the_decision_and_from_nodes(
    world: World, after: float, seconds: float
) -> None:
    world.next_lost_node = 9
    world.decisions = Decisions(requeue_after=after)
    assert await world.reconciler.attempt(KEY) == RequeueAfter(seconds)


async def test_decisions_take_a_limited_share_of_the_time(world: World) -> None:
    def slow(state: ClusterState, now: datetime) -> Decisions:
        world.time += 2
        return Decisions()

    world.reconciler._decide = slow
    await world.reconciler.attempt(KEY)
    assert await world.reconciler.attempt(KEY) == RequeueAfter(10)
