"""One line for each step with its seconds; a long step says now and then that it is alive."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ALIVE_EVERY = 15.0
"""Seconds between two signs of life of a step that takes long."""


class Step:
    """A step under way; `note` is shown with the next sign of life."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.note = ""
        self.started = time.monotonic()

    def line(self, ending: str) -> str:
        """What is printed: title, ending, seconds, note."""
        seconds = time.monotonic() - self.started
        note = f" ({self.note})" if self.note else ""
        return f"{self.title} {ending} {seconds:.1f} s{note}"


def say(text: str) -> None:
    """Print one line on stderr, so that stdout stays for results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[Step]:
    """Time the block and print its line; signs of life come from a thread of their own."""
    current = Step(title)
    end = threading.Event()

    def alive() -> None:
        while not end.wait(ALIVE_EVERY):
            say(current.line("..."))

    thread = threading.Thread(target=alive, daemon=True)
    thread.start()
    ending = "failed after"
    try:
        yield current
        ending = "done in"
    finally:
        end.set()
        thread.join()
        say(current.line(ending))
