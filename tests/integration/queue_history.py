"""The usage of queues at each time, from all states that watches have shown.

resourceVersions of all kinds are revisions of one etcd, so they order the states of different
kinds.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from e2e.history import History
from torchrun_api import names
from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS


class QueueHistory:
    """Jobs of one namespace, their child Jobs and their pods."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self.jobs = History(client, TORCHRUN_JOBS, namespace)
        self.gangs = History(client, JOBS, namespace)
        self.pods = History(client, PODS, namespace)

    @contextmanager
    def running(self) -> Iterator["QueueHistory"]:
        """Record until the end of the block."""
        with ExitStack() as stack:
            for history in (self.jobs, self.gangs, self.pods):
                stack.enter_context(history.running())
            yield self

    def moments(self) -> Iterator["Moment"]:
        """The state after each change, in order."""
        merged = [
            (int(state["metadata"]["resourceVersion"]), kind, state, history.is_last(state))
            for kind, history in (("job", self.jobs), ("gang", self.gangs), ("pod", self.pods))
            for state in history.states()
        ]
        moment = Moment()
        for _, kind, state, last in sorted(merged, key=lambda change: change[0]):
            moment.change(kind, state, last)
            yield moment


class Moment:
    """The objects at one time, and their usage."""

    def __init__(self) -> None:
        self._queues: dict[str, str] = {}
        self._charges: dict[str, int] = {}
        self._admitted: dict[str, bool] = {}
        self._gangs: dict[str, tuple[str, int]] = {}
        self._pods: dict[str, tuple[str, str]] = {}

    def change(self, kind: str, state: Any, last: bool) -> None:
        name = state["metadata"]["name"]
        labels = state["metadata"].get("labels", {})
        if kind == "job":
            status = state.get("status", {})
            self._queues[name] = state["spec"]["jobQueue"]
            self._charges[name] = 0 if last else status.get("admission", {}).get("nodes", 0)
            conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
            self._admitted[name] = not last and conditions.get("Admitted") == "True"
        elif kind == "gang":
            over = any(
                c["type"] in ("Complete", "Failed") and c["status"] == "True"
                for c in state["status"].get("conditions", ())
            )
            self._gangs.pop(name, None)
            if not (last or over):
                self._gangs[name] = (labels[names.JOB_LABEL], state["spec"]["completions"])
        elif labels.get(names.COMPONENT_LABEL) == names.WORKER:
            self._pods.pop(name, None)
            if not last and state["status"]["phase"] not in ("Succeeded", "Failed"):
                self._pods[name] = (labels[names.JOB_LABEL], labels[names.ATTEMPT_LABEL])

    def charged(self) -> Counter[str]:
        """Charged nodes of each queue, from the status of its jobs."""
        return self._by_queue(self._charges)

    def running(self) -> Counter[str]:
        """Nodes of the gangs of each queue; if a job has several gangs, the largest."""
        sizes: dict[str, int] = {}
        living = Counter(self._pods.values())
        for job, nodes in [*self._gangs.values(), *((j, n) for (j, _), n in living.items())]:
            sizes[job] = max(sizes.get(job, 0), nodes)
        return self._by_queue(sizes)

    def unadmitted(self) -> set[str]:
        """Jobs with a gang and without a charge."""
        jobs = {job for job, _ in self._gangs.values()}
        return {job for job in jobs if not self._charges.get(job)}

    def _by_queue(self, nodes: dict[str, int]) -> Counter[str]:
        total: Counter[str] = Counter()
        for job, count in nodes.items():
            total[self._queues[job]] += count
        return total


def assert_quotas_held(history: QueueHistory, quotas: dict[str, int]) -> dict[str, int]:
    """Check that charged and running nodes never exceed the quota. Returns their maximum."""
    most: Counter[str] = Counter()
    moments = 0
    for moment in history.moments():
        moments += 1
        for what, taken in (("charged", moment.charged()), ("runs", moment.running())):
            for queue, nodes in taken.items():
                assert nodes <= quotas[queue], f"{what}: {nodes} nodes of {queue}, moment {moments}"
        for queue, nodes in moment.running().items():
            most[queue] = max(most[queue], nodes)
        assert not moment.unadmitted(), f"no gang without its charge: {moment.unadmitted()}"
    assert moments > 0
    return dict(most)
