"""How the outcome of an attempt becomes a call of the work queue."""

import anyio
import pytest

from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import WriteResult
from torchrun_controller.client.write_errors import (
    RejectedError,
    SupersededError,
    UnavailableError,
)
from torchrun_controller.controllers.controller import (
    FORBIDDEN_RETRY,
    Controller,
    Outcome,
    Terminal,
)
from torchrun_controller.controllers.refusals import REJECTED_RETRY
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Apply, Event, Plan
from torchrun_controller.workqueue import AsyncWorkQueue
from unit.controllers.neighbours import (
    GONE,
    KEY,
    REJECTION,
    SERVICE,
    World,
    observed,
    waiting_for,
)


@pytest.fixture
def world() -> World:
    return World()


class TestSettling:
    """Each outcome becomes a call of the work queue."""

    @pytest.mark.parametrize(
        "error",
        [
            SupersededError("replaced"),
            ApiError(404, "NotFound", "no namespace"),
            UnavailableError("500"),
            RuntimeError("a bug"),
        ],
    )
    async def test_failures_are_retried_with_backoff(self, world: World, error: Exception) -> None:
        world.plan = lambda _: Plan(writes=(SERVICE,))
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

    async def test_a_revoked_permission_is_an_event(self, world: World) -> None:
        world.plan = lambda _: Plan(writes=(GONE,))
        message = 'jobs.batch "run" is forbidden: User "c" cannot delete resource "jobs"'
        world.failures = [ApiError(403, "Forbidden", message)]
        world.queue.add(KEY)
        await world.attempts()
        assert world.events == [Event("Warning", "Forbidden", message)]
        assert world.queue.next_ready() == FORBIDDEN_RETRY

    async def test_an_unhandled_refusal_is_no_hot_loop(self) -> None:
        class Refused:
            async def attempt(self, key: str) -> Outcome:
                raise RejectedError(REJECTION, permanent=True)

        world = World()
        queue: AsyncWorkQueue[str] = AsyncWorkQueue(world.clock)
        worker = Controller("queue", queue, Refused(), world.metrics, clock=world.clock)
        queue.add("gpu")
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.run)
                while queue.next_ready() != FORBIDDEN_RETRY:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()

    async def test_retry_after_is_the_delay(self, world: World) -> None:
        world.plan = lambda _: Plan(writes=(SERVICE,))
        world.failures = [UnavailableError("429", retry_after=3)]
        world.queue.add(KEY)
        await world.attempts()
        assert world.queue.next_ready() == 3
        assert world.queue.failures(KEY) == 1
        assert world.value("torchrun_reconcile_total", controller="job", outcome="Retry") == 1

    async def test_a_change_does_not_shorten_a_retry_after(self, world: World) -> None:
        world.plan = lambda _: Plan(writes=(SERVICE,))
        world.failures = [UnavailableError("429", retry_after=3)]
        world.queue.add(KEY)
        await world.attempts()
        world.time += 1
        world.queue.add(KEY)
        await world.attempts()
        assert SERVICE not in world.log
        assert world.queue.next_ready() == 2
        assert world.queue.failures(KEY) == 1
        assert world.value("torchrun_reconcile_total", controller="job", outcome="Postponed") == 1
        world.time += 2
        await world.attempts()
        assert SERVICE in world.log

    async def test_a_retry_after_delays_its_own_job_only(self, world: World) -> None:
        neighbour = ("team", "neighbour")
        world.present[neighbour] = observed("Running")
        world.plan = lambda _: Plan(writes=(SERVICE,))
        world.failures = [UnavailableError("429", retry_after=3)]
        world.queue.add(KEY)
        world.queue.add(neighbour)
        await world.attempts(2)
        assert SERVICE in world.log

    async def test_a_repeated_retry_after_backs_off(self, world: World) -> None:
        world.plan = lambda _: Plan(writes=(SERVICE,))
        world.queue.add(KEY)
        for _ in range(12):
            world.failures = [UnavailableError("429", retry_after=1)]
            await world.attempts()
            wait = world.queue.next_ready()
            assert wait is not None
            world.time += wait
        assert wait == pytest.approx(0.005 * 2**11)

    async def test_a_bug_affects_its_own_job_only(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        neighbour = ("team", "neighbour")
        world.present[neighbour] = observed("Running")

        def plan(current: Observed) -> Plan:
            if current.job.status.phase is None:
                raise ZeroDivisionError
            return Plan(writes=(SERVICE,))

        world.plan = plan
        world.queue.add(KEY)
        world.queue.add(neighbour)
        await world.attempts(2)
        assert world.log == [SERVICE]
        assert "ZeroDivisionError" in capsys.readouterr().out, "with its traceback"

    async def test_stale_caches_are_counted(self, world: World) -> None:
        world.plan = lambda _: Plan(writes=(SERVICE,))
        world.queue.add(KEY)
        await world.attempts()
        world.queue.add(KEY)
        await world.attempts()
        assert world.value("torchrun_stale_sync_skips_total") == 1
        assert world.queue.next_ready() == 1

    async def test_a_terminal_refusal_is_retried_after_a_long_time(self, world: World) -> None:
        world.plan = waiting_for
        world.failures = [RejectedError(REJECTION, permanent=True)]
        world.queue.add(KEY)
        await world.attempts()
        assert world.queue.next_ready() == REJECTED_RETRY
        assert world.value("torchrun_reconcile_total", controller="job", outcome="Terminal") == 1

    async def test_shutdown_finishes_the_current_key_only(self, world: World) -> None:
        started, release = anyio.Event(), anyio.Event()
        world.plan = lambda _: Plan(writes=(SERVICE,))
        original = world.apply

        async def apply(intent: Apply) -> WriteResult:
            started.set()
            await release.wait()
            return await original(intent)

        world.apply = apply  # type: ignore[method-assign]
        world.queue.add(KEY)
        world.queue.add(("team", "next"))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(world.worker.run)
                await started.wait()
                world.queue.shut_down()
                release.set()
        assert world.log == [SERVICE], "the current key is finished"
        assert len(world.observations) == 1, "waiting keys are not started"


async def test_controllers_have_metrics_of_their_own(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing:
        async def attempt(self, key: str) -> Outcome:
            return Terminal(ValueError(f"{key} is refused"))

    queue: AsyncWorkQueue[str] = AsyncWorkQueue(world.clock)
    worker = Controller("admission", queue, Refusing(), world.metrics, clock=world.clock)
    queue.add("everything")
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            while world.total_reconciles() < 1:
                await anyio.lowlevel.checkpoint()
            worker.shut_down()
    labels = {"controller": "admission", "outcome": "Terminal"}
    assert world.value("torchrun_reconcile_total", **labels) == 1
    assert "admission=everything" in capsys.readouterr().out
