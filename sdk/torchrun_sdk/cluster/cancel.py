"""Cancellation of a call from another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable


class Cancelled(Exception):
    """The call was cancelled."""


class Cancellation:
    """Whether a call is cancelled, and the actions that wake its waiting threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: list[Callable[[], object]] = []
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the call. Returns at once."""
        with self._lock:
            self._cancelled = True
            actions = list(self._actions)
        for action in actions:
            action()

    def check(self) -> None:
        """Raises Cancelled if the call is cancelled."""
        if self._cancelled:
            raise Cancelled

    @contextmanager
    def waking(self, action: Callable[[], object]) -> Iterator[None]:
        """Run the action at `cancel` while the block runs; at once if already cancelled."""
        with self._lock:
            self._actions.append(action)
            cancelled = self._cancelled
        try:
            if cancelled:
                action()
            yield
        finally:
            with self._lock:
                self._actions.remove(action)
