"""Values of labels, with a bounded number of queues, reasons and characters."""

import re

from torchrun_controller.cache.observe import Key
from torchrun_controller.reconcile.model.conditions import BLOCKED_REASONS

MAX_QUEUES = 100
MAX_REASONS = 60  # besides those that alerts name
MAX_LENGTH = 63  # characters of a label's value; a queue's name may have 253
OTHERS = "(others)"
# Reasons of queues that are not ready because a user chose it: the alert TorchrunQueueNotReady
# ignores them.
CHOSEN_BY_USERS = frozenset({"Paused", "Terminating"})
_OF_ALERTS = BLOCKED_REASONS | CHOSEN_BY_USERS
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,39}")


class QueueLabels:
    """The labels (namespace, name) of at most `limit` existing queues, in the order of creation.

    All other queues, and names of queues that do not exist, share `("", "(others)")`.
    """

    def __init__(self, limit: int = MAX_QUEUES) -> None:
        self._limit = limit
        self._labels: dict[Key, tuple[str, str]] = {}
        self._used_labels: set[tuple[str, str]] = set()
        self._waiting: dict[Key, None] = {}  # in the order of arrival

    def add(self, queue: Key) -> None:
        """Add an existing queue."""
        if queue in self._labels or queue in self._waiting:
            return
        label = queue[0][:MAX_LENGTH], queue[1][:MAX_LENGTH]
        if len(self._labels) < self._limit and label not in self._used_labels:
            self._labels[queue] = label
            self._used_labels.add(label)
        else:
            self._waiting[queue] = None

    def discard(self, queue: Key) -> tuple[tuple[str, str], ...]:
        """Remove a deleted queue. Returns the labels of the waiting queue that gets its place."""
        self._waiting.pop(queue, None)
        label = self._labels.pop(queue, None)
        if label is None:
            return ()
        self._used_labels.discard(label)
        waiting, self._waiting = list(self._waiting), {}
        for waiting_queue in waiting:
            self.add(waiting_queue)
        return tuple(self._labels[queue] for queue in waiting if queue in self._labels)

    def of(self, queue: Key) -> tuple[str, str]:
        """Return the labels of a queue: namespace and name, or the shared ones."""
        return self._labels.get(queue, ("", OTHERS))


class Reasons:
    """The first `limit` reasons are label values; all later ones share "(others)".

    Most reasons come from the controller, others from kubelets, schedulers and termination
    messages, so users choose them. Those that alerts name are always label values.
    """

    def __init__(self, limit: int = MAX_REASONS) -> None:
        self._limit = limit
        self._reasons: set[str] = set()

    def of(self, reason: str) -> str:
        """Return the label value of a reason."""
        if not reason or reason in _OF_ALERTS or reason in self._reasons:
            return reason
        if len(self._reasons) >= self._limit or not _REASON.fullmatch(reason):
            return OTHERS
        self._reasons.add(reason)
        return reason
