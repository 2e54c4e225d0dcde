"""Leaders in virtual time, and faults of their requests."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

from torchrun_controller.client import ApiError, Disconnected
from torchrun_controller.leader import Durations, Leader
from unit.leader.lease_server import Client


def now() -> float:
    return asyncio.get_running_loop().time()


def make(
    client: Client,
    transitions: Callable[[], None] = lambda: None,
    wall: datetime = datetime(2026, 1, 1, tzinfo=UTC),
) -> Leader:
    """`wall`: the system time of the machine when virtual time begins."""
    return Leader(
        client,
        identity=client.name,
        namespace="system",
        name="controller",
        durations=Durations(),
        on_transition=transitions,
        clock=asyncio.get_running_loop().time,
        now=lambda: wall + timedelta(seconds=now()),
        jitter=random.Random(client.name).random,
    )


@asynccontextmanager
async def running(leader: Leader) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(leader.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def leading(leader: Leader) -> AsyncIterator[asyncio.Task[None]]:
    """Run an elector and wait for its election."""
    async with running(leader) as task:
        await leader.elected.wait()
        yield task


async def until(moment: float) -> None:
    await asyncio.sleep(moment - now())


def refuse(status: int, methods: str = "GET POST PATCH WATCH") -> Callable[[str], None]:
    def fault(method: str) -> None:
        if method in methods.split():
            raise ApiError(status, "Because", "it is refused")

    return fault


def disconnect(method: str) -> None:
    raise Disconnected("reset")
