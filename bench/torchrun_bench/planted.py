"""A slow-down of the controller that is planted to see that the bench shows it.

Everything that the event loop runs is followed by burning as much CPU again: with a factor of 2 the
whole process takes twice the time that it needs. The product has no code for this.
It needs asyncio's own event loop, which runs each callback in Python; so what it is compared with
is a run with the factor 1.

Usage: python -m torchrun_bench.planted FACTOR FLAGS OF THE CONTROLLER
"""

import asyncio
import sys
import time
from collections.abc import Callable

_RUN = asyncio.Handle._run


def slowed(factor: float) -> Callable[[asyncio.Handle], None]:
    """What to put in the place of `asyncio.Handle._run`."""

    def run(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        try:
            _RUN(handle)
        finally:
            until = time.thread_time() + (time.thread_time() - began) * (factor - 1)
            while time.thread_time() < until:
                pass

    return run


def slow_down(factor: float) -> None:
    """Make this process's event loop slower, from now on."""
    asyncio.Handle._run = slowed(factor)  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    from torchrun_controller.__main__ import main

    slow_down(float(sys.argv.pop(1)))
    sys.argv += ["--uvloop", "false"]
    main()
