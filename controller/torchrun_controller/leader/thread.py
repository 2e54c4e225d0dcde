"""A leader in a separate thread, so that a busy main event loop does not lose the lease."""

import asyncio  # two event loops that wake each other; anyio's portals would block one of them
import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import anyio
import structlog

from torchrun_api.contract.exit_codes import CRASHED, LOST_LEASE
from torchrun_controller.leader.elector import Leader, NotLeader

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class LeaderThread:
    """Leadership by a `Leader` with its own thread, event loop and connection, for one `run`.

    `open_leader` is entered in the thread. The main loop may be busy for any time: the thread
    renews the lease. After a loss the main loop has `stop_seconds` to end the process, and then the
    thread ends it with `end_process`: requests that the main loop has buffered are not sent after
    the lease has expired.
    """

    def __init__(
        self,
        open_leader: Callable[[], AbstractAsyncContextManager[Leader]],
        stop_seconds: float,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.elected = anyio.Event()
        self._open_leader = open_leader
        self._stop_seconds = stop_seconds
        self._end_process = end_process
        self._leader: Leader | None = None  # until the thread has a connection
        self._main: asyncio.AbstractEventLoop
        self._loop: asyncio.AbstractEventLoop
        self._error: Exception | None = None  # what ended the election
        self._ended = anyio.Event()  # in the main loop, as `elected`
        # In the loop of the thread.
        self._stop = asyncio.Event()
        self._release = asyncio.Event()

    @property
    def problem(self) -> str:
        """Why the last read or write of the lease failed, "" if it succeeded."""
        return self._leader.problem if self._leader is not None else ""

    def may_write(self) -> bool:
        """Whether a write may begin now."""
        return self._leader is not None and self._leader.may_write()

    def check(self) -> None:
        """Raise NotLeader if no write may begin now."""
        if self._leader is None:
            raise NotLeader("the election has not begun")
        self._leader.check()

    async def run(self) -> None:
        """Become the leader and remain it until cancelled. Raises what `Leader.run` raises."""
        self._main, self._loop = asyncio.get_running_loop(), asyncio.new_event_loop()
        # A daemon: a process that ends without a release does not wait for it.
        threading.Thread(target=self._run_loop, name="lease", daemon=True).start()
        try:
            await self._ended.wait()
        finally:
            if not self._ended.is_set():
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._error is not None:
            raise self._error

    async def release(self) -> None:
        """Release the lease for a standby, see `Leader.release`."""
        if self._leader is None or self._ended.is_set():  # nothing was sent, or it is lost
            return
        self._loop.call_soon_threadsafe(self._release.set)
        await self._ended.wait()

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._lead())

    async def _lead(self) -> None:
        """Lead until `_stop`, then release the lease; after a loss, end the process."""
        async with AsyncExitStack() as stack:
            try:
                leader = await stack.enter_async_context(self._open_leader())
                if self._stop.is_set():  # before the first request
                    return
                self._leader = leader
                await self._lead_until_stop(leader)
            except Exception as error:
                self._error = error
                self._main.call_soon_threadsafe(self._ended.set)
                await self._end_process_late(error)
                return
            await self._release.wait()
            await leader.release()
        self._main.call_soon_threadsafe(self._ended.set)

    async def _lead_until_stop(self, leader: Leader) -> None:
        running = asyncio.create_task(leader.run())
        announcing = asyncio.create_task(self._announce_election(leader))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        stopping.cancel()
        if running.done():
            await running  # raises NotLeader
        running.cancel()
        await asyncio.wait((running,))

    async def _announce_election(self, leader: Leader) -> None:
        await leader.elected.wait()
        self._main.call_soon_threadsafe(self.elected.set)

    async def _end_process_late(self, error: Exception) -> None:
        await asyncio.sleep(self._stop_seconds)
        log.error(
            "exiting without a shutdown: the event loop is blocked",
            error=f"{type(error).__name__}: {error}",
            seconds=self._stop_seconds,
        )
        self._end_process(LOST_LEASE if isinstance(error, NotLeader) else CRASHED)
