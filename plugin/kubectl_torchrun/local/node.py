"""One node: the launcher as a process of this machine, in the place of a pod."""

import asyncio
import ctypes
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torchrun_runtime.launch.processes import descendants, send

_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 1 << 20  # longer lines are printed in pieces
_libc = ctypes.CDLL(None)


class LocalNode:
    """The launcher of one node, its ranks and their output."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, argv: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> "LocalNode":
        """Start the launcher. It is stopped if this process is killed. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=directory,
            env=environment,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            limit=_LINE_BYTES,
            start_new_session=True,  # Ctrl-C on the terminal is for this program
            preexec_fn=_end_with_parent,
        )
        return cls(process)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the output line by line, without newlines, until it ends."""
        reader = self._process.stdout
        assert reader is not None
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as error:
                line = await reader.readexactly(error.consumed)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    yield error.partial
                return
            yield line.removesuffix(b"\n")

    async def wait(self) -> int:
        """Return the exit code, negative for a signal, once the launcher has ended."""
        return await self._process.wait()

    async def stop(self, grace: float) -> None:
        """Ask the launcher to end, and kill it with all its ranks after `grace` seconds."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.wait(), grace)
        self.kill()

    def kill(self) -> None:
        """Kill the launcher and all processes below it."""
        if self._process.returncode is None:
            send(descendants(self._process.pid), signal.SIGKILL)
            self._process.kill()


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies (prctl(2)); Linux only."""
    with suppress(AttributeError):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
