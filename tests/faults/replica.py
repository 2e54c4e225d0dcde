"""The real controller on a simulated network, and the kubelet that restarts it."""

import asyncio
import random
from collections.abc import Callable
from datetime import datetime
from typing import cast

from faults.api_server import ApiServer
from faults.network import Client, Faults
from torchrun_controller.client.session import Observe, Transport
from torchrun_controller.clock import Clock
from torchrun_controller.leader import Leader
from torchrun_controller.manager import Components, Manager, Sessions, assemble
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.settings import Settings, parse

ARGUMENTS = [
    "--runtime-image=runtime:1",
    "--lease-namespace=system",
    "--progress-url=http://controller",
]
SETTINGS: Settings = parse(ARGUMENTS, {})
RESTART = 1.0  # seconds until an ended process is restarted


class Process:
    """One process of a controller."""

    def __init__(
        self, name: str, server: ApiServer, faults: Faults, now: Callable[[], datetime]
    ) -> None:
        self.client = Client(name, server, faults)
        self.metrics = Metrics()
        sessions = Sessions(
            self._session("watch", self.metrics.observe_request),
            self._session("write", self.metrics.observe_request),
        )
        loop = asyncio.get_running_loop()
        clock = Clock(
            monotonic=loop.time, wall=lambda: now() + faults.skew, jitter=random.Random(name).random
        )
        # Without its thread: the simulation has one event loop, in virtual time.
        leader = Leader(
            self._session("lease", self.metrics.observe_request),
            identity=name,
            namespace=SETTINGS.lease_namespace,
            name=SETTINGS.lease_name,
            durations=SETTINGS.lease_durations,
            on_transition=self.metrics.lease_transitions.inc,
            clock=clock.monotonic,
            now=clock.wall,
            jitter=clock.jitter,
        )
        self.components: Components = assemble(SETTINGS, sessions, leader, self.metrics, clock)
        self._terminated = asyncio.Event()
        self.exit: BaseException | None = None
        self._dead = asyncio.Event()
        self.client.ended = self._dead.set

    def _session(self, name: str, observe: Observe) -> Transport:
        """A simulated Transport, with the methods of the real one and no sockets."""
        return cast(Transport, self.client.session(name, observe))

    async def run(self) -> None:
        """Run until the process ends. `exit` is the reason."""
        working = asyncio.create_task(Manager(self.components, self._until_terminated).run())
        dying = asyncio.create_task(self._dead.wait())
        try:
            await asyncio.wait((working, dying), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not self.killed:
                self.exit = working.exception() or self._unless_terminated()
        finally:
            self.client.alive = False
            dying.cancel()
            while not working.done():  # a terminating process may miss the kill
                working.cancel()
                await asyncio.wait((working,), timeout=0.1)

    def terminate(self) -> None:
        """SIGTERM."""
        self._terminated.set()

    @property
    def leads(self) -> bool:
        return self.client.alive and self.components.leader.may_write()

    def _unless_terminated(self) -> Exception | None:
        return None if self._terminated.is_set() else RuntimeError("it ended for no reason")

    @property
    def killed(self) -> bool:
        return self._dead.is_set()

    async def _until_terminated(self) -> None:
        await self._terminated.wait()


class Replica:
    """A pod of the Deployment: successive processes, each with its own identity."""

    def __init__(
        self, name: str, server: ApiServer, faults: Faults, now: Callable[[], datetime]
    ) -> None:
        self.name = name
        self.processes: list[Process] = []
        self._make: Callable[[int], Process] = lambda number: Process(
            f"{name}-{number}", server, faults, now
        )

    @property
    def process(self) -> Process:
        """The running process, or the last one."""
        return self.processes[-1]

    async def run(self) -> None:
        """Start a process whenever none is running."""
        while True:
            self.processes.append(self._make(len(self.processes)))
            await self.process.run()
            await asyncio.sleep(RESTART)
