"""Watches of objects, and failures of a program that is started again after each end."""

from __future__ import annotations

import json
import threading
from typing import Any, Callable, NamedTuple

from torchrun_sdk.cluster.kubectl import Child, Kubectl

_PAUSE = 1.0  # between two watches
# Failures in a row: of a request that the cluster refuses, until it is an error; of another one,
# until it is reported.
_REFUSALS, _FAILURES = 5, 20
_REFUSED = ("(Forbidden)", "(Unauthorized)")
_CHANGES = ("ADDED", "MODIFIED", "DELETED")


class Trouble(NamedTuple):
    """Why a program fails each time. is_refused: the cluster refuses the request."""

    text: str
    is_refused: bool


class Failures:
    """Counts the failures in a row of a program that is started again after each end.

    what: the subject of the message. report: called if another attempt will not help, and once if
    the program fails for long.
    """

    def __init__(self, what: str, report: Callable[[Trouble], object]) -> None:
        self._what = what
        self._report = report
        self._count = 0

    def ended(self, child: Child) -> None:
        """Count an end of the program, which is a failure if it printed nothing but an error."""
        error = child.stderr_tail()
        if child.has_output or not error:
            self._count = 0
            return
        self._count += 1
        text = f"{self._what} failed {self._count} times in a row: {error}"
        if self._count >= _REFUSALS and any(word in error for word in _REFUSED):
            self._report(Trouble(text, is_refused=True))
        elif self._count == _FAILURES:
            self._report(Trouble(text, is_refused=False))


class Watch:
    """Changes of objects, from `kubectl get --watch`, which is restarted until `close`.

    `changed` gets the kind of change (ADDED, MODIFIED, DELETED) and the object. report: see
    `Failures`.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        words: list[str],
        changed: Callable[[str, dict[str, Any]], None],
        report: Callable[[Trouble], object] = lambda _: None,
    ) -> None:
        self._failures = Failures(f"kubectl get {' '.join(words)} --watch", report)
        self._command = kubectl.command(
            "get", *words, "--watch", "--output-watch-events", "--output=json"
        )
        self._changed = changed
        self._closed = threading.Event()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._closed.set()
        if self._child is not None:
            self._child.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            child = self._child = Child(self._command, self._event, whole=True)
            if self._closed.is_set():  # `close` has ended only the program before
                child.close()
                return
            child.wait()
            if "NotFound" in child.stderr_tail() and not self._closed.is_set():
                self._changed("DELETED", {})
            else:
                self._failures.ended(child)
            child.close()
            self._closed.wait(_PAUSE)

    def _event(self, line: str) -> None:
        """Handle one event, a line of kubectl's.

        An error of the API server is an event too; the watch ends after it and is restarted.
        """
        try:
            event = json.loads(line)
        except ValueError:
            return
        body = event.get("object") if isinstance(event, dict) else None
        if isinstance(body, dict) and event.get("type") in _CHANGES:
            self._changed(event["type"], body)
