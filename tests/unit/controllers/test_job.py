"""One attempt of the JobReconciler: the order of its writes, the status, refusals."""

import math

import pytest

from torchrun_api.job import TorchrunJob
from torchrun_api.meta import ObjectMeta
from torchrun_api.status import Phase, TorchrunJobStatus
from torchrun_controller.cache.expectations import EXPECTATION_TIMEOUT
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import (
    NameConflictError,
    RejectedError,
)
from torchrun_controller.controllers.controller import (
    FORBIDDEN_RETRY,
    Behind,
    Done,
    RequeueAfter,
    Terminal,
)
from torchrun_controller.controllers.refusals import CONFLICT_RETRY, REJECTED_RETRY
from torchrun_controller.reconcile.model.observed import Conflict, Observed
from torchrun_controller.reconcile.model.plan import Event, Plan
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


async def test_a_plan_is_carried_out_in_its_order(world: World) -> None:
    plan = Plan(applies=(SERVICE,), deletes=(GONE,), status=status("Running"), events=(STARTED,))
    world.plan = lambda _: plan
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == [SERVICE, GONE, status("Running")]
    assert world.events == [STARTED]


async def test_an_empty_plan_writes_nothing(world: World) -> None:
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == []


async def test_a_job_that_is_gone_is_forgotten(world: World) -> None:
    world.present.clear()
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.observations == []


async def test_deadlines_come_from_the_plan(world: World) -> None:
    world.plan = lambda _: Plan(requeue_after=7)
    assert await world.reconciler.attempt(KEY) == RequeueAfter(7)


async def test_nothing_is_decided_before_the_cache_shows_our_own_write(world: World) -> None:
    world.plan = lambda _: Plan(applies=(SERVICE,))
    await world.reconciler.attempt(KEY)
    assert isinstance(await world.reconciler.attempt(KEY), Behind)
    assert len(world.observations) == 1
    world.cache.resource_version = 1
    assert await world.reconciler.attempt(KEY) == Done()


async def test_a_cache_that_never_comes_is_not_waited_for_for_ever(world: World) -> None:
    world.plan = lambda _: Plan(applies=(SERVICE,))
    await world.reconciler.attempt(KEY)
    world.time += EXPECTATION_TIMEOUT - 0.5
    assert await world.reconciler.attempt(KEY) == Behind(0.5)
    world.time += 0.5
    assert await world.reconciler.attempt(KEY) == Done()


async def test_what_only_the_status_tells_of_is_told_first(world: World) -> None:
    world.plan = lambda _: Plan(
        deletes=(GONE,), status_before_deletes=True, status=status("Suspended")
    )
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == [status("Suspended"), GONE]


class TestStatus:
    """At most one write a second, unless the phase changes."""

    async def test_the_rest_of_the_second_is_waited_for(self, world: World) -> None:
        world.present[KEY] = observed("Running")
        world.cache.resource_version = 100
        world.plan = lambda _: Plan(status=status("Running", "1/2 ready"), events=(STARTED,))
        assert await world.reconciler.attempt(KEY) == Done()
        world.time += 0.25
        world.plan = lambda _: Plan(status=status("Running", "2/2 ready"), events=(STARTED,))
        assert await world.reconciler.attempt(KEY) == RequeueAfter(0.75)
        assert world.log == [status("Running", "1/2 ready")]
        assert world.events == [STARTED], "an event tells of the status that is there"
        world.time += 0.75
        assert await world.reconciler.attempt(KEY) == Done()
        assert world.log[1:] == [status("Running", "2/2 ready")]

    @pytest.mark.parametrize("phase", ["Running", "Succeeded"])
    async def test_a_write_that_fails_for_good_backs_off(self, world: World, phase: Phase) -> None:
        world.present[KEY] = observed("Running")
        world.plan = lambda _: Plan(status=status(phase, "too long"))
        world.failures = [ApiError(422, "Invalid", "status.message: Too long")] * 100
        world.queue.add(KEY)
        end = world.time + 3600
        while world.time < end:
            await world.attempts()
            wait = world.queue.next_ready()
            assert wait is not None
            world.time += wait
        writes = 100 - len(world.failures)
        assert writes < 25, "an hour of waits that double"
        assert world.queue.failures(KEY) == writes

    async def test_a_change_of_phase_is_written_at_once(self, world: World) -> None:
        world.present[KEY] = observed("Running")
        world.cache.resource_version = 100
        world.plan = lambda _: Plan(status=status("Running", "2/2 ready"))
        await world.reconciler.attempt(KEY)
        world.plan = lambda _: Plan(status=status("Succeeded"))
        assert await world.reconciler.attempt(KEY) == Done()
        assert world.log[-1] == status("Succeeded")

    async def test_of_what_was_just_created_waits_while_others_wait_to_start(
        self, world: World
    ) -> None:
        world.busy = True
        world.plan = lambda _: Plan(
            applies=(SERVICE,), deletes=(GONE,), status=status("Starting"), events=(STARTED,)
        )
        assert await world.reconciler.attempt(KEY) == RequeueAfter(1)
        assert (world.log, world.events) == ([SERVICE, GONE], [])
        world.cache.resource_version = 1
        world.plan = lambda _: Plan(status=status("Starting"), events=(STARTED,))
        assert await world.reconciler.attempt(KEY) == Done(), "nothing was created: it is told now"
        assert (world.log[2:], world.events) == ([status("Starting")], [STARTED])

    async def test_that_is_told_first_waits_for_nobody(self, world: World) -> None:
        world.busy = True
        plan = Plan(
            applies=(SERVICE,),
            deletes=(GONE,),
            status_before_deletes=True,
            status=status("Suspended"),
        )
        world.plan = lambda _: plan
        assert await world.reconciler.attempt(KEY) == Done()
        assert world.log == [SERVICE, status("Suspended"), GONE]

    async def test_other_writes_are_not_held_back(self, world: World) -> None:
        world.present[KEY] = observed("Running")
        world.cache.resource_version = 100
        world.plan = lambda _: Plan(applies=(SERVICE,), status=status("Running"))
        await world.reconciler.attempt(KEY)
        await world.reconciler.attempt(KEY)
        assert world.log == [SERVICE, status("Running"), SERVICE]


class TestObstacles:
    """A refusal is shown in the status at once, and not hammered at."""

    async def test_a_conflict_is_said_and_tried_again_later(self, world: World) -> None:
        world.plan = waiting_for
        world.failures = [NameConflictError(CONFLICT)]
        assert await world.reconciler.attempt(KEY) == RequeueAfter(CONFLICT_RETRY)
        assert world.observations[-1].refused.conflicts == (CONFLICT,)
        assert world.log == [status("Pending", "blocked")]

    async def test_nothing_is_touched_meanwhile(self, world: World) -> None:
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

    async def test_a_permanent_rejection_waits_for_the_user_and_not_for_ever(
        self, world: World
    ) -> None:
        """Admission policies answer as schemas do, and change by themselves."""
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

    async def test_it_goes_with_its_job(self, world: World) -> None:
        world.plan = waiting_for
        world.failures = [RejectedError(REJECTION, permanent=True)]
        await world.reconciler.attempt(KEY)
        world.cache.resource_version = 100
        world.present.clear()
        await world.reconciler.attempt(KEY)
        world.present[KEY] = observed()
        await world.reconciler.attempt(KEY)
        assert SERVICE in world.log

    async def test_a_plan_that_insists_is_no_hot_loop(self, world: World) -> None:
        world.plan = lambda _: Plan(applies=(SERVICE,))
        world.failures = [RejectedError(REJECTION, permanent=True)]
        world.queue.add(KEY)
        await world.attempts()
        assert world.queue.next_ready() == REJECTED_RETRY
        assert world.log == [], "it is refused once, and not sent again"
        assert world.value("torchrun_reconcile_panics_total") == 0


async def test_waits_are_measured_when_they_end(world: World) -> None:
    created = NOW.replace(second=0)
    job = TorchrunJob(
        metadata=ObjectMeta(name="run", namespace="team", creation_timestamp=created),
        status=TorchrunJobStatus(phase="Queued"),
    )
    world.present[KEY] = Observed(job=job)
    world.plan = lambda _: Plan(status=status("Running"))
    await world.reconciler.attempt(KEY)
    assert world.value("torchrun_job_start_seconds_sum") == 5
    assert math.isclose(world.value("torchrun_job_start_seconds_count"), 1)
