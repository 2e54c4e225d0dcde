"""The async queue waits without polling and loses no wake-up."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from torchrun_controller.workqueue import AsyncWorkQueue, ShutDownError
from virtual_time import in_virtual_time


def loop_clock() -> Callable[[], float]:
    return asyncio.get_running_loop().time


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


@in_virtual_time
async def test_a_waiting_key_is_taken_at_once() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    queue.add("a")
    assert await queue.take() == "a"


@in_virtual_time
async def test_an_add_wakes_exactly_one_taker() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    takers = [asyncio.create_task(queue.take()) for _ in range(3)]
    await settle()
    queue.add("a")
    await settle()
    assert [taker.done() for taker in takers] == [True, False, False]
    queue.add("b")
    queue.add("c")
    assert await asyncio.gather(*takers) == ["a", "b", "c"]


@in_virtual_time
async def test_a_deadline_wakes_a_taker_at_its_time() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    queue.add_after("late", 1000)
    taker = asyncio.create_task(queue.take())
    second = asyncio.create_task(queue.take())
    await settle()
    queue.add_after("early", 7)
    queue.add_after("later", 2000)
    assert await taker == "early"
    assert asyncio.get_running_loop().time() == pytest.approx(7)
    assert await second == "late"
    assert asyncio.get_running_loop().time() == pytest.approx(1000)
    assert await queue.take() == "later"


@in_virtual_time
async def test_a_short_delay_stays_short() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    queue.add_rate_limited("a")
    assert await queue.take() == "a"
    assert asyncio.get_running_loop().time() == pytest.approx(0.005)


@in_virtual_time
async def test_a_waiting_queue_does_not_poll() -> None:
    loop = asyncio.get_running_loop()
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop.time)
    queue.add_after("a", 100_000)
    taker = asyncio.create_task(queue.take())
    await settle()
    passes = 0
    original = queue.get

    def counted() -> str | None:
        nonlocal passes
        passes += 1
        return original()

    queue.get = counted  # type: ignore[method-assign]
    assert await taker == "a"
    assert passes == 1


@in_virtual_time
async def test_a_cancelled_sleeper_leaves_no_trace() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    for _ in range(100):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.take(), 1)
    assert not queue._takers
    queue.add("a")
    assert await queue.take() == "a"


@in_virtual_time
async def test_a_taker_cancelled_while_asleep_does_not_swallow_an_add() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    first = asyncio.create_task(queue.take())
    second = asyncio.create_task(queue.take())
    await settle()
    first.cancel()
    queue.add("a")  # before the cancelled task runs
    assert await second == "a"
    assert first.cancelled()


@in_virtual_time
async def test_a_taker_cancelled_after_its_wake_up_passes_it_on() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    first = asyncio.create_task(queue.take())
    second = asyncio.create_task(queue.take())
    await settle()
    queue.add("a")  # wakes the first
    first.cancel()
    assert await second == "a"
    assert first.cancelled()


@in_virtual_time
async def test_done_wakes_a_taker_for_a_marked_key() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    queue.add("a")
    assert await queue.take() == "a"
    taker = asyncio.create_task(queue.take())
    queue.add("a")
    await settle()
    assert not taker.done()
    queue.done("a")
    assert await taker == "a"


@in_virtual_time
async def test_shutdown_ends_every_taker_after_the_last_key() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    sleepers = [asyncio.create_task(queue.take()) for _ in range(2)]
    await settle()
    queue.add_after("never", 5)
    queue.shut_down()
    results = await asyncio.gather(*sleepers, return_exceptions=True)
    assert all(isinstance(result, ShutDownError) for result in results)
    with pytest.raises(ShutDownError):
        await queue.take()


@in_virtual_time
async def test_shutdown_hands_out_waiting_keys() -> None:
    queue: AsyncWorkQueue[str] = AsyncWorkQueue(loop_clock())
    queue.add("a")
    assert await queue.take() == "a"
    queue.add("a")
    queue.add("b")
    queue.shut_down()
    assert await queue.take() == "b"
    queue.done("a")
    assert await queue.take() == "a"
    with pytest.raises(ShutDownError):
        await queue.take()


@in_virtual_time
async def test_a_busy_taker_lets_others_run() -> None:
    queue: AsyncWorkQueue[int] = AsyncWorkQueue(loop_clock())
    for key in range(100):
        queue.add(key)
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while len(queue):
            beats += 1
            await asyncio.sleep(0)

    heartbeat = asyncio.create_task(heart())
    while len(queue):
        queue.done(await queue.take())
    await heartbeat
    assert beats >= 99


async def churn(seed: int) -> None:
    """Producers, deadlines and randomly cancelled workers: every added key must be processed."""
    chance = random.Random(seed)
    queue: AsyncWorkQueue[int] = AsyncWorkQueue(asyncio.get_running_loop().time)
    wanted: Counter[int] = Counter()
    seen: dict[int, int] = {}
    busy: set[int] = set()
    idle = asyncio.Event()

    async def work() -> None:
        while True:
            key = await queue.take()
            assert key not in busy
            busy.add(key)
            seen[key] = wanted[key]  # adds before the work began
            try:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                busy.remove(key)
                queue.done(key)
                if not (len(queue) or queue.delayed or busy):
                    idle.set()

    workers = [asyncio.create_task(work()) for _ in range(4)]
    for _ in range(2000):
        key = chance.randrange(20)
        wanted[key] += 1
        if chance.random() < 0.3:
            queue.add_after(key, chance.choice([0.0001, 0.002, 0.01]))
        else:
            queue.add(key, chance.choice([0, 0, -100, 3]))
        if chance.random() < 0.2:
            victim = chance.randrange(len(workers))
            workers[victim].cancel()
            workers[victim] = asyncio.create_task(work())
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
    wanted[-1] += 1
    queue.add(-1)
    idle.clear()
    await asyncio.wait_for(idle.wait(), 60)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert seen == wanted


@in_virtual_time
@pytest.mark.parametrize("seed", range(8))
async def test_no_add_is_ever_lost(seed: int) -> None:
    await churn(seed)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_no_add_is_ever_lost_in_real_time(
    runner: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    runner(churn(99))


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_deadline_in_real_time(runner: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def main() -> None:
        queue: AsyncWorkQueue[str] = AsyncWorkQueue(time.monotonic)
        start = time.monotonic()
        queue.add_after("a", 0.0105)
        assert await asyncio.wait_for(queue.take(), 60) == "a"
        assert time.monotonic() - start >= 0.0105

    runner(main())
