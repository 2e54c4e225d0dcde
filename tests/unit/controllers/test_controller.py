"""What becomes of one key, whatever happens to it."""

import math

import anyio
import pytest

from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import JOBS, SERVICES
from torchrun_api.meta import ObjectMeta
from torchrun_api.status import Phase, TorchrunJobStatus
from torchrun_controller.cache.expectations import PATIENCE
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import (
    NameConflictError,
    RejectedError,
    SupersededError,
    UnavailableError,
    WriteResult,
)
from torchrun_controller.controllers.controller import (
    FORBIDDEN_RETRY,
    Behind,
    Controller,
    Done,
    Outcome,
    RequeueAfter,
    Terminal,
)
from torchrun_controller.controllers.refusals import CONFLICT_RETRY, REJECTED_RETRY
from torchrun_controller.reconcile.model.observed import Conflict, Observed, Rejection
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event, Plan
from torchrun_controller.workqueue import AsyncWorkQueue
from unit.controllers.neighbours import KEY, NOW, World, observed, status

SERVICE = Apply(SERVICES, {"metadata": {"name": "run", "namespace": "team"}})
GONE = Delete(kind=JOBS, namespace="team", name="run", uid="u")
STARTED = Event("Normal", "Started", "it runs")
CONFLICT = Conflict("services", "run", "Service 'run' belongs to somebody else")
REJECTION = Rejection("services", "run", "Service 'run': not like this")


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
    world.time += PATIENCE - 0.5
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


def waiting_for(seen: Observed) -> Plan:
    """As reconcile does: nothing is made while something stands in the way."""
    if seen.refused.conflicts or seen.refused.rejections:
        return Plan(status=status("Pending", "blocked"))
    return Plan(applies=(SERVICE,), status=status("Running"))


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


class TestSettling:
    """Outcomes become verbs of the queue."""

    @pytest.mark.parametrize(
        "error",
        [
            SupersededError("replaced"),
            ApiError(404, "NotFound", "no namespace"),
            UnavailableError("500"),
            RuntimeError("a bug"),
        ],
    )
    async def test_failures_come_back_with_backoff(self, world: World, error: Exception) -> None:
        world.plan = lambda _: Plan(applies=(SERVICE,))
        world.failures = [error]
        world.queue.add(KEY)
        await world.attempts()
        assert world.queue.failures(KEY) == 1
        assert world.queue.next_ready() == pytest.approx(0.005)
        bugs = 1 if isinstance(error, RuntimeError) else 0
        assert world.value("torchrun_reconcile_panics_total") == bugs
        assert world.value("torchrun_reconcile_total", controller="job", outcome="Retry") == 1
        world.time += 1
        await world.attempts()
        assert world.queue.failures(KEY) == 0, "a success forgets them"
        assert SERVICE in world.log

    async def test_a_right_that_was_taken_away_is_an_event(self, world: World) -> None:
        world.plan = lambda _: Plan(deletes=(GONE,))
        message = 'jobs.batch "run" is forbidden: User "c" cannot delete resource "jobs"'
        world.failures = [ApiError(403, "Forbidden", message)]
        world.queue.add(KEY)
        await world.attempts()
        assert world.events == [Event("Warning", "Forbidden", message)]
        assert world.queue.next_ready() == FORBIDDEN_RETRY

    async def test_a_refusal_that_nobody_deals_with_is_no_hot_loop(self) -> None:
        class Refused:
            async def attempt(self, key: str) -> Outcome:
                raise RejectedError(REJECTION, permanent=True)

        world = World()
        queue: AsyncWorkQueue[str] = AsyncWorkQueue(world.clock)
        worker = Controller("queue", queue, Refused(), world.metrics, clock=world.clock)
        queue.add("gpu")
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.run)
                while queue.next_ready() != FORBIDDEN_RETRY:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()

    async def test_the_server_says_when(self, world: World) -> None:
        world.plan = lambda _: Plan(applies=(SERVICE,))
        world.failures = [UnavailableError("429", retry_after=3)]
        world.queue.add(KEY)
        await world.attempts()
        assert world.queue.next_ready() == 3
        assert world.queue.failures(KEY) == 1

    async def test_a_server_that_goes_on_asking_for_a_second_gets_less_and_less(
        self, world: World
    ) -> None:
        world.plan = lambda _: Plan(applies=(SERVICE,))
        world.queue.add(KEY)
        for _ in range(12):
            world.failures = [UnavailableError("429", retry_after=1)]
            await world.attempts()
            wait = world.queue.next_ready()
            assert wait is not None
            world.time += wait
        assert wait == pytest.approx(0.005 * 2**11)

    async def test_a_bug_costs_its_own_job_only(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        neighbour = ("team", "neighbour")
        world.present[neighbour] = observed("Running")

        def plan(seen: Observed) -> Plan:
            if seen.job.status.phase is None:
                raise ZeroDivisionError
            return Plan(applies=(SERVICE,))

        world.plan = plan
        world.queue.add(KEY)
        world.queue.add(neighbour)
        await world.attempts(2)
        assert world.log == [SERVICE]
        assert "ZeroDivisionError" in capsys.readouterr().out, "with its traceback"

    async def test_stale_caches_are_counted(self, world: World) -> None:
        world.plan = lambda _: Plan(applies=(SERVICE,))
        world.queue.add(KEY)
        await world.attempts()
        world.queue.add(KEY)
        await world.attempts()
        assert world.value("torchrun_stale_sync_skips_total") == 1
        assert world.queue.next_ready() == 1

    async def test_a_terminal_refusal_is_left_alone_for_long(self, world: World) -> None:
        world.plan = waiting_for
        world.failures = [RejectedError(REJECTION, permanent=True)]
        world.queue.add(KEY)
        await world.attempts()
        assert world.queue.next_ready() == REJECTED_RETRY
        assert world.value("torchrun_reconcile_total", controller="job", outcome="Terminal") == 1

    async def test_shut_down_ends_the_worker_and_leaves_what_waits(self, world: World) -> None:
        started, release = anyio.Event(), anyio.Event()
        world.plan = lambda _: Plan(applies=(SERVICE,))
        original = world.apply

        async def apply(intent: Apply) -> WriteResult:
            started.set()
            await release.wait()
            return await original(intent)

        world.apply = apply  # type: ignore[method-assign]
        world.queue.add(KEY)
        world.queue.add(("team", "next"))
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(world.worker.run)
                await started.wait()
                world.queue.shut_down()
                release.set()
        assert world.log == [SERVICE], "what is in work is finished"
        assert len(world.observations) == 1, "what waits is not begun"


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


async def test_a_controller_of_another_kind_of_key_is_told_apart(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing:
        async def attempt(self, key: str) -> Outcome:
            return Terminal(ValueError(f"{key} is refused"))

    queue: AsyncWorkQueue[str] = AsyncWorkQueue(world.clock)
    worker = Controller("admission", queue, Refusing(), world.metrics, clock=world.clock)
    queue.add("everything")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            while world.total_reconciles() < 1:
                await anyio.lowlevel.checkpoint()
            worker.shut_down()
    labels = {"controller": "admission", "outcome": "Terminal"}
    assert world.value("torchrun_reconcile_total", **labels) == 1
    assert "admission=everything" in capsys.readouterr().out
