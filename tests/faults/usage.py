"""What jobs use of a quota: the requests of their pods and child Jobs, and what they are charged with.

A gang that a Job is about to create counts as a whole, because its pods follow.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from bodies import Body
from faults.cluster import JOBS, NODES, PODS, TORCHRUN_JOBS, is_over, is_worker, owners
from faults.store import Change, Store
from torchrun_api import names
from torchrun_api.kinds.status import TERMINAL

Amounts: TypeAlias = Counter[str]  # nodes, gpus and jobs
KINDS = ("nodes", "gpus", "jobs")
VERDICTS = {"Complete", "SuccessCriteriaMet", "Failed", "FailureTarget"}
GPU = "nvidia.com/gpu"


class Usage:
    """The gangs in a store, by the UID of their job, also after its deletion."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, str] = {}  # UID of the TorchrunJob by that of its child Job
        self._silent: set[str] = set()  # UIDs of pods whose node was lost, even if it has returned
        self._failed: set[str] = set()  # UIDs of child Jobs with a pod that has failed, or will
        store.subscribe(self._changed)

    def _changed(self, change: Change) -> None:
        if change.resource == JOBS and change.verb == "ADDED":
            for uid in owners(change.body):
                self._jobs[change.body["metadata"]["uid"]] = uid
        elif change.resource == PODS and _has_failed(change.body):
            self._failed |= owners(change.body)
        elif change.resource == NODES and (change.verb == "DELETED" or not _is_ready(change.body)):
            name = change.body["metadata"]["name"]
            lost = (pod for pod in self._store.bodies(PODS) if pod["spec"].get("nodeName") == name)
            self._silent.update(pod["metadata"]["uid"] for pod in lost)

    def job_of(self, pod: Body) -> str:
        """The UID of the TorchrunJob of a worker."""
        return next((self._jobs[uid] for uid in owners(pod) if uid in self._jobs), "")

    def children(self) -> Iterator[Body]:
        """All child Jobs."""
        for child in self._store.bodies(JOBS):
            if names.MANAGED_BY_LABEL in child["metadata"].get("labels", {}):
                yield child

    def latest(self, uid: str) -> list[Body]:
        """The child Jobs of the latest attempt of a job."""
        children = [child for child in self.children() if uid in owners(child)]
        last = max(map(attempt_of, children), default=0)
        return [child for child in children if attempt_of(child) == last]

    def living(self, uid: str) -> list[Body]:
        """Workers of the job that have not ended."""
        pods = self._store.bodies(PODS)
        return [
            pod for pod in pods if is_worker(pod) and self.job_of(pod) == uid and not is_over(pod)
        ]

    def is_silent(self, pod: Body) -> bool:
        """Whether the node of the pod is or was lost."""
        return pod["metadata"]["uid"] in self._silent

    def by_gangs(self, uid: str) -> Amounts:
        """The most that a gang of the job uses. A resize replaces one by another.

        Without pods on lost machines, which count as gone.
        """
        gangs: dict[int, Amounts] = defaultdict(Counter)
        for pod in self.living(uid):
            if not self.is_silent(pod):
                gangs[attempt_of(pod)] += _requests(pod["spec"])
        created = amounts_of(child for child in self.latest(uid) if self._creates_pods(child))
        used = created
        for gang in gangs.values():
            used |= gang
        if used:
            used["jobs"] = 1
        return used

    def of_deleted(self, uid: str) -> Amounts:
        """What is left of a deleted job uses: its pods with a node.

        Pods without one are deleted within seconds. Until then they may find a node beyond the
        quota: labels, which users can write, are not believed instead.
        """
        used: Amounts = Counter()
        for pod in self.living(uid):
            if pod["spec"].get("nodeName") and not self.is_silent(pod):
                used += _requests(pod["spec"])
        if used:
            used["jobs"] = 1
        return used

    def _creates_pods(self, child: Body) -> bool:
        """Whether pods of this Job may follow. If it retries none, a failed pod is its end."""
        spec, meta = child["spec"], child["metadata"]
        has_failed = meta["uid"] in self._failed and spec.get("backoffLimit") == 0
        conditions = child.get("status", {}).get("conditions", ())
        verdicts = {each["type"] for each in conditions if each["status"] == "True"}
        return not (has_failed or verdicts & VERDICTS or "deletionTimestamp" in meta)

    def taken(self, job: Body) -> Amounts:
        """What the job uses, or may use by its charge, for which a gang may follow at any time.

        The charge of a finished job is for pods that have come back with a lost machine.
        """
        used = self.by_gangs(job["metadata"]["uid"])
        is_finished = job.get("status", {}).get("phase") in TERMINAL
        return used if is_finished else used | charge_of(job)

    def job(self, uid: str) -> Body | None:
        """The TorchrunJob with this UID, if it exists."""
        jobs = self._store.bodies(TORCHRUN_JOBS)
        return next((job for job in jobs if job["metadata"]["uid"] == uid), None)


def charge_of(job: Body | None) -> Amounts:
    """What the job is charged with by its status."""
    admission: Body = (job or {}).get("status", {}).get("admission") or {}
    if not (nodes := admission.get("nodes", 0)):
        return Counter()
    gpus = admission.get("gpus", 0)
    first = admission["head"].get("gpus", 0) if admission.get("head") else gpus
    return Counter(nodes=nodes, gpus=first + (nodes - 1) * gpus, jobs=1)


def amounts_of(children: Iterable[Body]) -> Amounts:
    """What all pods of these child Jobs request."""
    total: Amounts = Counter()
    for child in children:
        each = _requests(child["spec"]["template"]["spec"])
        total.update({kind: child["spec"]["completions"] * each[kind] for kind in each})
    return total


def attempt_of(body: Body) -> int:
    """The attempt of a child Job or a worker."""
    return int(body["metadata"]["labels"][names.ATTEMPT_LABEL])


def _requests(pod_spec: Body) -> Amounts:
    containers: list[Any] = pod_spec["containers"]
    gpus = sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in containers)
    return Counter(nodes=1, gpus=gpus)


def _has_failed(pod: Body) -> bool:
    """Whether the pod has failed. For its Job, the end of a deleted pod is a failure."""
    return pod["status"]["phase"] == "Failed" or "deletionTimestamp" in pod["metadata"]


def _is_ready(node: Body) -> bool:
    conditions: list[Body] = node.get("status", {}).get("conditions", [])
    return all(each["status"] == "True" for each in conditions if each["type"] == "Ready")
