"""A planted slow-down of the controller, to check that the bench detects it.

After each callback, the event loop burns CPU: with a factor of 2 the process needs twice the time.
The product has no code for this. It needs the event loop of asyncio, which runs callbacks in
Python, so it is compared with a run with factor 1.

Usage: python -m torchrun_bench.planted FACTOR FLAGS OF THE CONTROLLER
"""

import asyncio
import sys
import time
from collections.abc import Callable

_RUN = asyncio.Handle._run


def slowed(factor: float) -> Callable[[asyncio.Handle], None]:
    """The replacement of `asyncio.Handle._run`."""

    def run(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        try:
            _RUN(handle)
        finally:
            until = time.thread_time() + (time.thread_time() - start) * (factor - 1)
            while time.thread_time() < until:
                pass

    return run


def slow_down(factor: float) -> None:
    """Slow down the event loop of this process from now on."""
    asyncio.Handle._run = slowed(factor)  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    from torchrun_controller.__main__ import main

    slow_down(float(sys.argv.pop(1)))
    sys.argv += ["--uvloop", "false"]
    main()
