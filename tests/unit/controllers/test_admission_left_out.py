"""A job whose status cannot be written stops no other job."""

from contextlib import suppress
from datetime import datetime
from itertools import pairwise

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import UserObject
from torchrun_controller.cache.admission_view import ObservedAdmission
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import Status, WriteResult
from torchrun_controller.client.write_errors import SupersededError, UnavailableError
from torchrun_controller.controllers.admission import (
    BEHIND_RETRY,
    KEEPS_TURN,
    MAX_RETRY,
    SETTLE_SECONDS,
)
from torchrun_controller.controllers.controller import Behind, RequeueAfter
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    PendingStatus,
    Queue,
    QueueSummary,
    QuotaLimits,
    RoundRobinState,
)
from unit.controllers.admitting_world import KEY, NOW, World

TOO_LARGE = ApiError(500, "InternalError", "etcdserver: request is too large")
UNKNOWN = UnavailableError("it fails for this object")


class Cluster(World):
    """A world in which the coordinator decides: each queue has room for one job of two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts_of_stuck: list[float] = []

    def observe(self, now: datetime) -> ObservedAdmission | None:
        observed = super().observe(now)
        assert observed is not None
        room = QuotaLimits(nodes=2)
        queues = tuple(Queue(namespace="t", name=name, quota=room) for name in ("lab", "other"))
        workloads = tuple(
            entry.classification.workload
            for entry in observed.entries
            if entry.classification.workload is not None
        )
        return replace(observed, state=ClusterState(queues=queues, workloads=workloads))

    def decide(self, state: ClusterState, now: datetime) -> Decisions:
        super().decide(state, now)
        return admit(state, now)

    async def apply_status(
        self, owner: UserObject, status: Status, manager: str = ""
    ) -> WriteResult | None:
        if owner.metadata.uid == "stuck":
            self.attempts_of_stuck.append(self.time)
        return await super().apply_status(owner, status, manager)

    async def run(self, seconds: float, step: float = 1) -> None:
        """Attempt once in `step` seconds."""
        end = self.time + seconds
        while self.time < end:
            with suppress(ApiError, UnavailableError):
                await self.reconciler.attempt(KEY)
            self.catch_up()
            self.time += step

    def admitted(self) -> set[str]:
        jobs = (job for job in self.server.values() if isinstance(job, TorchrunJob))
        return {j.metadata.name for j in jobs if j.status.admission and j.status.admission.nodes}

    def reasons(self) -> set[str]:
        return {event.reason for event in self.events}


@pytest.fixture
def world() -> Cluster:
    return Cluster()


@pytest.mark.parametrize(("error", "seconds"), [(TOO_LARGE, 3), (UNKNOWN, SETTLE_SECONDS + 3)])
async def test_a_stuck_admission_stops_no_other_job(
    world: Cluster, error: Exception, seconds: float
) -> None:
    world.job("stuck", queue="lab", priority=1)
    world.job("next", queue="lab")
    world.job("neighbour", queue="other")
    world.always["stuck"] = error
    await world.run(seconds)
    assert world.admitted() == {"neighbour"}, "the job keeps its turn at first"
    await world.run(KEEPS_TURN * seconds + 2**KEEPS_TURN)
    assert world.admitted() == {"next", "neighbour"}
    event = next(event for event in world.events if event.reason == "StatusRefused")
    assert str(error) in event.message or "does not carry out" in event.message


async def test_a_job_that_is_refused_once_keeps_its_turn(world: Cluster) -> None:
    world.job("first", queue="lab", priority=1)
    world.job("next", queue="lab")
    world.always["first"] = TOO_LARGE
    await world.run(0.5, step=0.1)
    assert world.admitted() == set()
    del world.always["first"]
    await world.run(2)
    assert world.admitted() == {"first"}


@pytest.mark.parametrize(("error", "seconds"), [(TOO_LARGE, 3), (UNKNOWN, SETTLE_SECONDS + 3)])
async def test_a_stuck_preemption_stops_no_other_queue(
    world: Cluster, error: Exception, seconds: float
) -> None:
    world.job("stuck", queue="lab", held=2)
    world.job("vip", queue="lab", priority=1)
    world.job("neighbour", queue="other")
    world.always["stuck"] = error
    await world.run(seconds)
    assert world.admitted() == {"stuck", "neighbour"}, "its quota is in use"


@pytest.mark.parametrize("error", [TOO_LARGE, UNKNOWN])
async def test_a_stuck_job_is_tried_about_once_a_minute(world: Cluster, error: Exception) -> None:
    world.job("stuck")
    world.always["stuck"] = error
    await world.run(600)
    times = world.attempts_of_stuck
    assert times[1] - times[0] <= 2, "the API server may just have started"
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert MAX_RETRY <= max(pauses) <= MAX_RETRY + SETTLE_SECONDS + 2
    await world.run(3600 * 48, step=MAX_RETRY + 1)
    del world.always["stuck"]
    await world.run(MAX_RETRY + SETTLE_SECONDS + 2)
    assert world.admitted() == {"stuck"}


async def test_the_next_try_is_scheduled(world: Cluster) -> None:
    world.job("stuck")
    world.always["stuck"] = TOO_LARGE
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    world.catch_up()
    assert await world.reconciler.attempt(KEY) == RequeueAfter(1)


async def test_a_deleted_job_is_no_longer_left_out(world: Cluster) -> None:
    world.job("stuck")
    world.always["stuck"] = TOO_LARGE
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    del world.server["stuck"]
    world.catch_up()
    await world.reconciler.attempt(KEY)
    assert world.reconciler._refused == {}


async def test_no_job_is_left_out_for_an_outage(world: Cluster) -> None:
    world.job("a")
    down = UnavailableError("no answer")
    world.always["a"] = world.read_error = down
    await world.run(SETTLE_SECONDS * 3)
    del world.always["a"]
    world.read_error = None
    await world.reconciler.attempt(KEY)
    assert world.admitted() == {"a"}
    assert world.reasons() == {"Admitted"}


async def test_a_job_that_is_gone_is_no_refusal(world: Cluster) -> None:
    world.job("a")
    world.failures["a"] = [(UnavailableError("no answer"), False)]
    with pytest.raises(UnavailableError):
        await world.reconciler.attempt(KEY)
    del world.server["a"]
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    world.catch_up()
    await world.run(SETTLE_SECONDS + 1)
    assert world.reasons() == set()


def reporting(world: World) -> None:
    """Decide the shares of the queue, and a report about job b."""
    shares = RoundRobinState(weight=1, current=1)
    world.decisions = Decisions(
        queues=(QueueSummary(namespace="t", name="lab", round_robin=shares),),
        pending={"b": PendingStatus("BehindInQueue", "wait", 1)},
    )


async def test_a_conflict_on_a_queue_stops_no_report() -> None:
    world = World()
    world.job("b")
    reporting(world)
    world.always["q"] = SupersededError("changed meanwhile")
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    assert world.log == ["b"]


async def test_a_queue_whose_shares_cannot_be_written_stops_no_report() -> None:
    """It is not read: the controller may only list queues."""
    world = World()
    world.job("b")
    reporting(world)
    world.always["q"] = UNKNOWN
    world.read_error = AssertionError("read")
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await world.reconciler.attempt(KEY)
    world.time += SETTLE_SECONDS
    await world.reconciler.attempt(KEY)
    assert world.log == ["b"]
    assert NOW in {c.last_transition_time for c in world.server["b"].status.conditions}
