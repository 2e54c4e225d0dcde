"""Workers whose pods were removed before their containers were seen to have ended.

Only the moment of the removal shows that. The next reconcile records them in `status.unfenced`.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from datetime import datetime, timedelta

from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_controller.cache.store import Change
from torchrun_controller.reconcile.model.observed import Vanished
from torchrun_controller.reconcile.pods.lifecycle import MAY_RUN, state_of

# The status has them long before.
KEPT = timedelta(minutes=10)


class VanishedWorkers:
    """The workers that vanished lately, by namespace and name of their job.

    Bounded by the removals in KEPT. `now` is the time in UTC.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._workers: defaultdict[tuple[str, str], deque[Vanished]] = defaultdict(deque)
        self._order: deque[tuple[str, str]] = deque()  # the job of each, from the oldest

    def note(self, change: Change[Pod], initial: bool) -> None:
        """Note a removed worker that has a machine and may still run."""
        pod = change.old
        if change.new is not None or pod is None or not pod.spec.node_name:
            return
        meta = pod.metadata
        if meta.labels.component == names.WORKER and state_of(pod) in MAY_RUN:
            self._forget_old()
            key = meta.namespace, meta.labels.torchrun_job
            self._workers[key].append(Vanished(pod, self._now()))
            self._order.append(key)

    def of(self, namespace: str, job: str) -> tuple[Vanished, ...]:
        """Return the workers of a job that vanished lately."""
        self._forget_old()
        return tuple(self._workers.get((namespace, job), ()))

    def _forget_old(self) -> None:
        oldest = self._now() - KEPT
        while self._order and self._workers[self._order[0]][0].time <= oldest:
            key = self._order.popleft()
            self._workers[key].popleft()
            if not self._workers[key]:
                del self._workers[key]
