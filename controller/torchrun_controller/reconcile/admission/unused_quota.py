"""Selects the shrunk gangs that release quota they do not use: as few as a head needs.

The quota stays charged until reconcile has released the nodes. It is reduced here only to see which
gangs are enough.
"""

from collections.abc import Callable, Iterable, Iterator

from torchrun_controller.reconcile.admission.preemption import preemption_order
from torchrun_controller.reconcile.admission.quota import Usage, usage_of
from torchrun_controller.reconcile.admission.snapshot import PendingWorkload, QueueSnapshot


class UnusedAdmission:
    """The part of its admission that a shrunk gang does not use; it keeps `nodes`."""

    def __init__(self, queue: QueueSnapshot, uid: str, nodes: int, usage: Usage) -> None:
        self.queue = queue
        self.uid = uid
        self.nodes = nodes
        self.usage = usage

    def release(self, times: int = -1) -> None:
        """Reduce the use of the quota; `times` 1 restores it."""
        self.queue.quota.add(self.usage, times)


def releases_of_quota(
    queues: Iterable[QueueSnapshot], head: PendingWorkload, can_start: Callable[[], bool]
) -> dict[str, int]:
    """Return the nodes that shrunk gangs of the queues of a cohort keep, by UID.

    It is empty if all of them are not enough, or if the head can still not start.
    """
    releases: list[UnusedAdmission] = []
    try:
        for unused in _unused_admissions(queues):
            if not _lacks_quota(head):
                break
            unused.release()
            releases.append(unused)
        # Some may be unnecessary: a later one freed everything that was missing.
        for unused in reversed(releases[:-1]):
            unused.release(1)
            if _lacks_quota(head):
                unused.release()
            else:
                releases.remove(unused)
        if _lacks_quota(head) or not can_start():
            return {}
        return {unused.uid: unused.nodes for unused in releases}
    finally:
        for unused in releases:
            unused.release(1)


def _unused_admissions(queues: Iterable[QueueSnapshot]) -> Iterator[UnusedAdmission]:
    for queue in queues:
        for admitted in sorted(queue.admitted, key=preemption_order):
            workload, nodes = admitted.workload, admitted.kept_nodes
            if nodes is not None:
                usage = usage_of(workload, workload.admitted - nodes, 0)
                yield UnusedAdmission(queue, workload.uid, nodes, usage)


def _lacks_quota(head: PendingWorkload) -> bool:
    return head.queue.quota.shortage(head.usage) is not None
