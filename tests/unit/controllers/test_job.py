"""One attempt of the JobReconciler: the order of its writes, the status, refusals."""

import math

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ObjectMeta
from torchrun_api.kinds.resources import PODS
from torchrun_api.kinds.status import Phase, TorchrunJobStatus
from torchrun_controller.cache.expectations import EXPECTATION_TIMEOUT
from torchrun_controller.client import ApiError
from torchrun_controller.client.write_errors import NameConflictError, RejectedError
from torchrun_controller.controllers.controller import (
    FORBIDDEN_RETRY,
    Behind,
    Done,
    RequeueAfter,
    Terminal,
)
from torchrun_controller.controllers.refusals import CONFLICT_RETRY, REJECTED_RETRY
from torchrun_controller.reconcile.model.observed import Conflict, Observed
from torchrun_controller.reconcile.model.plan import Delete, Event, Plan, StatusWrite
from unit.controllers.neighbours import (
    GONE,
    KEY,
    NOW,
    REJECTION,
    SERVICE,
    World,
    observed,
    status,
    waiting_for,
)

STARTED = Event("Normal", "Started", "it runs")
CONFLICT = Conflict("services", "run", "Service 'run' belongs to somebody else")


@pytest.fixture
def world() -> World:
    return World()


async def test_the_writes_of_a_plan_keep_their_order(world: World) -> None:
    plan = Plan(writes=(SERVICE, GONE, StatusWrite(status=status("Running"), events=(STARTED,))))
    world.plan = lambda _: plan
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == [SERVICE, GONE, status("Running")]
    assert world.events == [STARTED]


async def test_an_empty_plan_writes_nothing(world: World) -> None:
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == []


async def test_a_deleted_job_is_forgotten(world: World) -> None:
    world.present.clear()
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.observations == []


async def test_deadlines_come_from_the_plan(world: World) -> None:
    world.plan = lambda _: Plan(requeue_after=7)
    assert await world.reconciler.attempt(KEY) == RequeueAfter(7)


async def test_no_decision_before_the_cache_shows_our_own_write(world: World) -> None:
    world.plan = lambda _: Plan(writes=(SERVICE,))
    await world.reconciler.attempt(KEY)
    assert isinstance(await world.reconciler.attempt(KEY), Behind)
    assert len(world.observations) == 1
    world.cache.resource_version = 1
    assert await world.reconciler.attempt(KEY) == Done()


async def test_the_wait_for_a_cache_is_bounded(world: World) -> None:
    world.plan = lambda _: Plan(writes=(SERVICE,))
    await world.reconciler.attempt(KEY)
    world.time += EXPECTATION_TIMEOUT - 0.5
    assert await world.reconciler.attempt(KEY) == Behind(0.5)
    world.time += 0.5
    assert await world.reconciler.attempt(KEY) == Done()


async def test_a_status_before_deletes_is_written_first(world: World) -> None:
    world.plan = lambda _: Plan(
        writes=(StatusWrite(status=status("Suspended"), before_deletes=True), GONE)
    )
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == [status("Suspended"), GONE]


PODS_OF_THE_GANG = Delete(
    kind=PODS, namespace="ml", name="train", uid="uid-gang", grace_seconds=5, collection=True
)


async def test_a_collection_is_deleted_after_the_status(world: World) -> None:
    world.plan = lambda _: Plan(
        writes=(GONE, StatusWrite(status=status("Queued")), PODS_OF_THE_GANG)
    )
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == [GONE, status("Queued"), PODS_OF_THE_GANG]


async def test_a_collection_is_deleted_although_the_status_waits(world: World) -> None:
    world.present[KEY] = observed("Queued")
    world.cache.resource_version = 100
    world.plan = lambda _: Plan(writes=(StatusWrite(status=status("Queued", "1/2 ready")),))
    await world.reconciler.attempt(KEY)
    world.plan = lambda _: Plan(writes=(StatusWrite(status=status("Queued")), PODS_OF_THE_GANG))
    assert isinstance(await world.reconciler.attempt(KEY), RequeueAfter)
    assert world.log[-1] == PODS_OF_THE_GANG


async def test_a_gang_is_not_deleted_for_a_replacement_that_is_refused(world: World) -> None:
    world.failures = [RejectedError(REJECTION, permanent=True)]
    world.plan = lambda _: Plan(
        writes=(SERVICE, GONE, StatusWrite(status=status("Pending")), PODS_OF_THE_GANG)
    )
    await world.reconciler.attempt(KEY)
    assert PODS_OF_THE_GANG not in world.log
    assert GONE not in world.log
    assert status("Pending") in world.log


class TestStatus:
    """At most one write a second, unless the phase changes."""

    async def test_the_status_waits_for_the_rest_of_the_second(self, world: World) -> None:
        world.present[KEY] = observed("Running")
        world.cache.resource_version = 100
        world.plan = lambda _: Plan(
            writes=(StatusWrite(status=status("Running", "1/2 ready"), events=(STARTED,)),)
        )
        assert await world.reconciler.attempt(KEY) == Done()
        world.time += 0.25
        world.plan = lambda _: Plan(
            writes=(StatusWrite(status=status("Running", "2/2 ready"), events=(STARTED,)),)
        )
        assert await world.reconciler.attempt(KEY) == RequeueAfter(0.75)
        assert world.log == [status("Running", "1/2 ready")]
        assert world.events == [STARTED], "events describe the stored status"
        world.time += 0.75
        assert await world.reconciler.attempt(KEY) == Done()
        assert world.log[1:] == [status("Running", "2/2 ready")]

    @pytest.mark.parametrize(("nodes", "seconds"), [(2, 1), (300, 3), (5000, 10)])
    async def test_the_status_of_a_large_gang_is_written_less_often(
        self, world: World, nodes: int, seconds: int
    ) -> None:
        world.present[KEY] = observed("Running")
        world.cache.resource_version = 100
        world.plan = lambda _: Plan(
            writes=(StatusWrite(status=replace(status("Running", "a"), num_nodes=nodes)),)
        )
        assert await world.reconciler.attempt(KEY) == Done()
        assert await world.reconciler.attempt(KEY) == RequeueAfter(seconds)
        world.plan = lambda _: Plan(
            writes=(StatusWrite(status=replace(status("Failed"), num_nodes=nodes)),)
        )
        assert await world.reconciler.attempt(KEY) == Done(), "a new phase is written at once"

    @pytest.mark.parametrize("phase", ["Running", "Succeeded"])
    async def test_a_status_that_is_refused_is_tried_again_slowly(
        self, world: World, phase: Phase
    ) -> None:
        world.present[KEY] = observed("Running")
        world.plan = lambda _: Plan(writes=(StatusWrite(status=status(phase, "too long")),))
        world.failures = [ApiError(422, "Invalid", "status.message: Too long")] * 100
        world.queue.add(KEY)
        end = world.time + 3600
        while world.time < end:
            await world.attempts()
            wait = world.queue.next_ready()
            assert wait is not None
            world.time += wait
        writes = 100 - len(world.failures)
        assert 10 < writes < 15, "every five minutes"

    async def test_a_change_of_phase_is_written_at_once(self, world: World) -> None:
        world.present[KEY] = observed("Running")
        world.cache.resource_version = 100
        world.plan = lambda _: Plan(writes=(StatusWrite(status=status("Running", "2/2 ready")),))
        await world.reconciler.attempt(KEY)
        world.plan = lambda _: Plan(writes=(StatusWrite(status=status("Succeeded")),))
        assert await world.reconciler.attempt(KEY) == Done()
        assert world.log[-1] == status("Succeeded")

    async def test_the_status_of_a_new_gang_waits_while_other_jobs_start(
        self, world: World
    ) -> None:
        world.busy = True
        world.plan = lambda _: Plan(
            writes=(SERVICE, GONE, StatusWrite(status=status("Starting"), events=(STARTED,)))
        )
        assert await world.reconciler.attempt(KEY) == RequeueAfter(1)
        assert (world.log, world.events) == ([SERVICE, GONE], [])
        world.cache.resource_version = 1
        world.plan = lambda _: Plan(
            writes=(StatusWrite(status=status("Starting"), events=(STARTED,)),)
        )
        assert await world.reconciler.attempt(KEY) == Done(), (
            "nothing was created, so the status is written"
        )
        assert (world.log[2:], world.events) == ([status("Starting")], [STARTED])

    async def test_a_status_before_deletes_is_not_delayed(self, world: World) -> None:
        world.busy = True
        plan = Plan(
            writes=(SERVICE, StatusWrite(status=status("Suspended"), before_deletes=True), GONE)
        )
        world.plan = lambda _: plan
        assert await world.reconciler.attempt(KEY) == Done()
        assert world.log == [SERVICE, status("Suspended"), GONE]

    async def test_nothing_is_deleted_before_the_status_that_records_it(self, world: World) -> None:
        world.present[KEY] = observed("Running")
        world.cache.resource_version = 100
        world.plan = lambda _: Plan(writes=(StatusWrite(status=status("Running", "1/2 ready")),))
        await world.reconciler.attempt(KEY)
        last = StatusWrite(status=status("Running", "2/2 ready"), before_deletes=True)
        world.plan = lambda _: Plan(writes=(last, GONE))
        assert isinstance(await world.reconciler.attempt(KEY), RequeueAfter)
        assert GONE not in world.log
        world.time += 1
        await world.reconciler.attempt(KEY)
        assert world.log[1:] == [last.status, GONE]

    async def test_other_writes_are_not_delayed(self, world: World) -> None:
        world.present[KEY] = observed("Running")
        world.cache.resource_version = 100
        world.plan = lambda _: Plan(writes=(SERVICE, StatusWrite(status=status("Running"))))
        await world.reconciler.attempt(KEY)
        await world.reconciler.attempt(KEY)
        assert world.log == [SERVICE, status("Running"), SERVICE]


class TestObstacles:
    """A refusal is in the status at once, and is retried slowly."""

    async def test_a_conflict_is_shown_and_retried(self, world: World) -> None:
        world.plan = waiting_for
        world.failures = [NameConflictError(CONFLICT)]
        assert await world.reconciler.attempt(KEY) == RequeueAfter(CONFLICT_RETRY)
        assert world.observations[-1].refused.conflicts == (CONFLICT,)
        assert world.log == [status("Pending", "blocked")]

    async def test_no_writes_until_the_conflict_is_retried(self, world: World) -> None:
        world.plan = waiting_for
        world.failures = [NameConflictError(CONFLICT)]
        await world.reconciler.attempt(KEY)
        world.cache.resource_version = 100
        world.time += 10
        outcome = await world.reconciler.attempt(KEY)
        assert outcome == RequeueAfter(CONFLICT_RETRY - 10)
        assert SERVICE not in world.log
        world.time += CONFLICT_RETRY
        assert await world.reconciler.attempt(KEY) == Done()
        assert SERVICE in world.log

    async def test_a_permanent_rejection_is_retried_after_a_long_time(self, world: World) -> None:
        """A refusal by an admission policy looks like one by the schema, and policies change."""
        world.plan = waiting_for
        error = RejectedError(REJECTION, permanent=True)
        world.failures = [error]
        assert await world.reconciler.attempt(KEY) == Terminal(error, REJECTED_RETRY)
        assert world.observations[-1].refused.rejections == (REJECTION,)
        world.cache.resource_version = 100
        world.time += 10
        assert await world.reconciler.attempt(KEY) == RequeueAfter(REJECTED_RETRY - 10)
        assert SERVICE not in world.log
        world.time += REJECTED_RETRY
        assert await world.reconciler.attempt(KEY) == Done()
        assert SERVICE in world.log

    async def test_a_job_without_a_gang_retries_less_often_each_time(self, world: World) -> None:
        """Each retry takes an admission from other jobs for a moment."""
        world.plan = waiting_for
        delays = []
        for _ in range(9):
            world.failures = [NameConflictError(CONFLICT)]
            outcome = await world.reconciler.attempt(KEY)
            assert isinstance(outcome, RequeueAfter)
            delays.append(outcome.seconds)
            world.cache.resource_version += 100
            world.time += outcome.seconds
        assert delays == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]

    @pytest.mark.parametrize("changed", [observed(generation=2), observed(queue=2)])
    async def test_a_change_of_job_or_queue_is_tried_at_once(
        self, world: World, changed: Observed
    ) -> None:
        world.plan = waiting_for
        world.failures = [RejectedError(REJECTION, permanent=True)]
        await world.reconciler.attempt(KEY)
        world.cache.resource_version = 100
        world.present[KEY] = changed
        assert await world.reconciler.attempt(KEY) == Done()
        assert SERVICE in world.log

    async def test_quota_and_admission_are_retried_slowly(self, world: World) -> None:
        world.plan = waiting_for
        world.failures = [RejectedError(REJECTION, permanent=False)]
        assert await world.reconciler.attempt(KEY) == RequeueAfter(FORBIDDEN_RETRY)
        world.cache.resource_version = 100
        world.time += FORBIDDEN_RETRY
        assert await world.reconciler.attempt(KEY) == Done()
        assert SERVICE in world.log

    async def test_an_obstacle_is_forgotten_with_its_job(self, world: World) -> None:
        world.plan = waiting_for
        world.failures = [RejectedError(REJECTION, permanent=True)]
        await world.reconciler.attempt(KEY)
        world.cache.resource_version = 100
        world.present.clear()
        await world.reconciler.attempt(KEY)
        world.present[KEY] = observed()
        await world.reconciler.attempt(KEY)
        assert SERVICE in world.log

    async def test_a_plan_that_repeats_a_refused_write_is_no_hot_loop(self, world: World) -> None:
        world.plan = lambda _: Plan(writes=(SERVICE,))
        world.failures = [RejectedError(REJECTION, permanent=True)]
        world.queue.add(KEY)
        await world.attempts()
        assert world.queue.next_ready() == REJECTED_RETRY
        assert world.log == [], "the write is sent once"
        assert world.value("torchrun_reconcile_panics_total") == 0


async def test_the_start_is_measured_when_the_job_runs(world: World) -> None:
    created = NOW.replace(second=0)
    job = TorchrunJob(
        metadata=ObjectMeta(name="run", namespace="team", creation_timestamp=created),
        status=TorchrunJobStatus(phase="Queued"),
    )
    world.present[KEY] = Observed(job=job)
    world.plan = lambda _: Plan(writes=(StatusWrite(status=status("Running")),))
    await world.reconciler.attempt(KEY)
    assert world.value("torchrun_job_start_seconds_sum") == 5
    assert math.isclose(world.value("torchrun_job_start_seconds_count"), 1)
