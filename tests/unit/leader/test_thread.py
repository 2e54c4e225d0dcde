"""A leader in its thread, beside a main event loop that is blocked: real threads and real time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import structlog

from torchrun_api.contract.exit_codes import CRASHED, LOST_LEASE
from torchrun_controller.client import ConfigError
from torchrun_controller.leader import Durations, Leader, LeaderThread, NotLeader
from unit.leader.electing import refuse
from unit.leader.lease_server import Client, LeaseServer

# The lease is renewed every 50 ms, so that a busy machine loses none within 2 s.
QUICK = Durations(lease=3, renew_deadline=2, retry=0.05)


class Process:
    """A process with a leader thread. Its main event loop is that of the test."""

    def __init__(self, server: LeaseServer, stop_seconds: float = 60.0) -> None:
        self.client = Client(server, "a")
        self.exit_code: int | None = None
        self.exited = threading.Event()
        self.opening: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint
        self.leader = LeaderThread(self._open, stop_seconds, self._exit)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Leader]:
        await self.opening()
        yield Leader(
            self.client, identity="a", namespace="system", name="controller", durations=QUICK
        )

    def _exit(self, code: int) -> None:
        self.exit_code = code
        self.exited.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        task = asyncio.create_task(self.leader.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.wait_for(self.leader.release(), 60)
            await asyncio.to_thread(_join_lease_threads)

    @asynccontextmanager
    async def leading(self) -> AsyncIterator["asyncio.Task[None]"]:
        async with self.running() as task:
            await asyncio.wait_for(self.leader.elected.wait(), 60)
            yield task


def _join_lease_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "lease":
            thread.join(60)
            assert not thread.is_alive()


def block_until_renewed(process: Process, seconds: float) -> None:
    """Block the event loop until a renewal that is sent this much later."""
    renewed = threading.Event()
    began: list[float] = []

    def look(method: str) -> None:
        if method == "PATCH":
            now = asyncio.get_running_loop().time()
            began.append(now)
            if now - began[0] > seconds:
                renewed.set()

    process.client.fault = look
    assert renewed.wait(60)


async def test_a_blocked_event_loop_keeps_the_lease() -> None:
    server = LeaseServer()
    process = Process(server)
    assert not process.leader.may_write()
    with pytest.raises(NotLeader):
        process.leader.check()
    async with process.leading() as run:
        block_until_renewed(process, 1.5 * QUICK.renew_deadline)
        process.leader.check()
        await asyncio.sleep(0)
        assert not run.done()
        assert server.spec["leaseTransitions"] == 0


async def test_the_end_releases_the_lease() -> None:
    server = LeaseServer()
    process = Process(server)
    async with process.leading():
        assert server.spec["holderIdentity"] == "a"
    assert server.spec["holderIdentity"] == ""
    assert not process.leader.may_write()
    assert process.exit_code is None


async def test_without_a_release_the_lease_expires() -> None:
    server = LeaseServer()
    process = Process(server)
    async with process.leading() as run:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert process.leader.may_write(), "writes may finish"
        block = asyncio.get_running_loop().time() + 60
        while process.leader.may_write():
            assert asyncio.get_running_loop().time() < block
            await asyncio.sleep(0.05)
        assert server.spec["holderIdentity"] == "a"


async def test_a_lost_lease_ends_the_run() -> None:
    server = LeaseServer()
    process = Process(server, stop_seconds=0.0)
    async with process.leading() as run:
        process.client.fault = refuse(500)
        with pytest.raises(NotLeader, match="not renewed within 2 s"):
            await asyncio.wait_for(run, 60)
        assert "500" in process.leader.problem
        with pytest.raises(NotLeader):
            process.leader.check()


async def test_a_lost_lease_ends_a_process_whose_event_loop_is_blocked() -> None:
    process = Process(LeaseServer(), stop_seconds=0.1)
    with structlog.testing.capture_logs() as lines:
        async with process.leading():
            process.client.fault = refuse(500)
            assert process.exited.wait(60)  # blocks the event loop
    assert process.exit_code == LOST_LEASE
    assert lines[-1]["event"] == "exiting without a shutdown: the event loop is blocked"


@pytest.mark.parametrize("error", [ConfigError("no token"), ZeroDivisionError()])
async def test_a_thread_without_a_connection_ends_the_process(error: Exception) -> None:
    process = Process(LeaseServer(), stop_seconds=0.0)

    async def fail() -> None:
        raise error

    process.opening = fail
    async with process.running() as run:
        with pytest.raises(type(error)):
            await asyncio.wait_for(run, 60)
    assert process.exited.wait(60)
    assert process.exit_code == CRASHED


async def test_an_end_before_the_connection_is_open_sends_nothing() -> None:
    server = LeaseServer()
    process = Process(server)
    opened = threading.Event()

    async def wait() -> None:
        assert await asyncio.to_thread(opened.wait, 60)

    process.opening = wait
    async with process.running() as run:
        await asyncio.sleep(0)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await asyncio.wait_for(process.leader.release(), 60)
        opened.set()
    assert server.log == []
    assert process.exit_code is None
