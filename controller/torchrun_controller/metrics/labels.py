"""Labels with few values: a bounded number of queues, reasons and characters."""

import re

from torchrun_controller.cache.observe import Key

MOST_QUEUES = 100
MOST_REASONS = 60
LONGEST = 63  # characters of a label's value; a queue's name may have 253
OTHERS = "(others)"
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,39}")


class QueueLabels:
    """The first queues have series of their own, until they are deleted.

    All other queues, and unknown names of queues, share `("", "(others)")`.
    """

    def __init__(self, most: int = MOST_QUEUES) -> None:
        self._most = most
        self._own: dict[Key, tuple[str, str]] = {}
        self._taken: set[tuple[str, str]] = set()
        self._waiting: dict[Key, None] = {}  # in the order in which they came

    def add(self, queue: Key) -> None:
        """Note an existing queue."""
        if queue in self._own or queue in self._waiting:
            return
        label = queue[0][:LONGEST], queue[1][:LONGEST]
        if len(self._own) < self._most and label not in self._taken:
            self._own[queue] = label
            self._taken.add(label)
        else:
            self._waiting[queue] = None

    def discard(self, queue: Key) -> None:
        """Note a deleted queue; the first queue without own series gets its place."""
        self._waiting.pop(queue, None)
        label = self._own.pop(queue, None)
        if label is None:
            return
        self._taken.discard(label)
        waiting, self._waiting = list(self._waiting), {}
        for other in waiting:
            self.add(other)

    def of(self, queue: Key) -> tuple[str, str]:
        """Namespace and name for labels."""
        return self._own.get(queue, ("", OTHERS))


class Reasons:
    """The first reasons are labels of their own, later ones share one.

    Most come from the controller; others from kubelets, schedulers and termination messages.
    """

    def __init__(self, most: int = MOST_REASONS) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, reason: str) -> str:
        """The reason for a label."""
        if not reason or reason in self._known:
            return reason
        if len(self._known) >= self._most or not _REASON.fullmatch(reason):
            return OTHERS
        self._known.add(reason)
        return reason
