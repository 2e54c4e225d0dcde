"""Which queues share quota, and whose quota a job uses or waits for."""

from typing import TypeAlias

from torchrun_api.kinds.job import TorchrunJob
from torchrun_controller.reconcile.admission.model import ClusterState, Queue

# The namespace, "" if several share the cohort; the cohort; the queue, if it has no cohort.
CohortKey: TypeAlias = tuple[str, str, str]


class Cohorts:
    """The cohorts of a state."""

    def __init__(self, state: ClusterState) -> None:
        self._sharing_namespaces = frozenset(state.cohort_namespaces)
        self._keys = {(q.namespace, q.name): self.key(q) for q in state.queues}

    def key(self, queue: Queue) -> CohortKey:
        """Return the cohort of a queue. A queue without one forms a cohort of its own."""
        if not queue.cohort:
            return queue.namespace, "", queue.name
        shares_cohorts = queue.namespace in self._sharing_namespaces
        return "" if shares_cohorts else queue.namespace, queue.cohort, ""

    def of_job(self, job: TorchrunJob) -> frozenset[CohortKey]:
        """Return the cohorts of the queue that a job names, and of the one that it is charged to.

        A user may have moved the job to another queue.
        """
        namespace, admission = job.metadata.namespace, job.status.admission
        charged = admission.queue if admission is not None else ""
        queues = {job.spec.job_queue, charged or job.spec.job_queue}
        return frozenset(self._keys.get((namespace, q), (namespace, "", q)) for q in queues)
