"""The key of admission: no node is promised twice, even if writes fail."""

import asyncio
from datetime import datetime
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from torchrun_controller.client import apply
from torchrun_controller.client.write_errors import SupersededError, UnavailableError
from torchrun_controller.controllers.admission import (
    BEHIND_RETRY,
    CONFIRM_TIMEOUT,
    FIELD_MANAGER,
    MAX_REPORTS,
    MIN_DELAY,
)
from torchrun_controller.controllers.controller import Behind, Done, Postponed, RequeueAfter
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    Grant,
    PendingStatus,
    Preemption,
    QueueSummary,
    RoundRobinState,
)
from unit.controllers.admitting_world import KEY, World, admit


@pytest.fixture
def world() -> World:
    return World()


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
    assert await world.reconciler.attempt(KEY) == Postponed(10)
