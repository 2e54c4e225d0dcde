"""Simulated Job controller for Indexed Jobs.

With `backoffLimitPerIndex` it replaces single pods (docs/decisions/0011-replacement-of-single-pods.md).
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from bodies import Body
from faults.api_server import ApiServer
from faults.cluster import COUNTS, JOBS, PODS, Actor, index_of, is_over, owners
from faults.store import Change
from gates import failures_before
from torchrun_api import names

FINALIZER = "batch.kubernetes.io/job-tracking"
# DefaultJobPodFailureBackOff and MaxJobPodFailureBackOff of job_controller.go
BACKOFF, LONGEST_BACKOFF = timedelta(seconds=10), timedelta(minutes=10)


class JobController(Actor):
    """Indexed Jobs: one pod for each index.

    With backoffLimit 0 the first failure ends the Job. With backoffLimitPerIndex a failed pod is
    replaced after a delay, and its finalizer keeps it until then. Both limits end the Job together:
    a user may set backoffLimit later. The limit of an index is never reached.
    """

    def __init__(self, server: ApiServer, now: Callable[[], datetime]) -> None:
        super().__init__(server, now, "kube-controller-manager")
        self._made: dict[str, set[str]] = {}  # indexes by the Job's UID
        self._succeeded: dict[str, set[str]] = {}  # indexes by the Job's UID
        self._failed: dict[str, set[str]] = {}  # UIDs of pods by the Job's UID

    def changed(self, change: Change) -> None:
        if change.resource == JOBS:
            self.soon(COUNTS, self.look, change.body["metadata"]["uid"])
        elif change.resource == PODS:
            for uid in owners(change.body):
                self.soon(COUNTS, self.look, uid)

    def look(self, uid: str) -> None:
        job = self.find(JOBS, uid)
        if job is None or "deletionTimestamp" in job["metadata"] or _finished(job):
            for pod in list(self._pods_of(uid)):
                self._release(pod)
        elif "backoffLimitPerIndex" in job["spec"]:
            self._look_at_each(job)
        else:
            self._look_at_all(job)

    def _look_at_all(self, job: Body) -> None:
        """Sync a Job whose first failure ends it."""
        uid = job["metadata"]["uid"]
        pods = {index_of(pod): pod for pod in self._pods_of(uid)}
        indexes = self._made.setdefault(uid, set())
        ended = [pods[i]["status"]["phase"] if i in pods else "Failed" for i in indexes]
        alive = [i for i in indexes if i in pods and not is_over(pods[i])]
        failed = ended.count("Failed")
        if job["spec"].get("suspend") and not failed:
            for index in alive:
                self.hands.delete(PODS, pods[index])
            indexes.clear()  # their deletion is no failure
            self._write_status(job, 0, 0, 0, have_ended=False)
            return
        if failed:
            for index in alive:
                if "deletionTimestamp" not in pods[index]["metadata"]:
                    self.hands.delete(PODS, pods[index])
        elif not job["spec"].get("suspend"):
            for index in map(str, range(job["spec"]["completions"])):
                if index not in indexes and index not in pods:
                    indexes.add(index)
                    self.hands.create(PODS, self._pod(job, index))
                    alive.append(index)
        have_ended = bool(failed) and not alive
        self._write_status(job, len(alive), ended.count("Succeeded"), failed, have_ended)

    def _look_at_each(self, job: Body) -> None:
        """Sync a Job that replaces single pods."""
        uid = job["metadata"]["uid"]
        pods = sorted(self._pods_of(uid), key=failures_before)
        newest = {index_of(pod): pod for pod in pods}
        succeeded = self._succeeded.setdefault(uid, set())
        succeeded |= {index_of(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        failed = self._failed.setdefault(uid, set())
        failed |= {p["metadata"]["uid"] for p in pods if p["status"]["phase"] == "Failed"}
        active = [pod for pod in newest.values() if not is_over(pod) and not _terminates(pod)]
        fails = len(failed) > job["spec"]["backoffLimit"]
        kept = set(newest) - succeeded  # indexes whose newest pod has its finalizer
        if fails or job["spec"].get("suspend"):
            for pod in active:
                self.hands.delete(PODS, pod)
            active, kept = [], set()
        elif waits := self._waits(job, newest, succeeded):
            due = {index for index, wait in waits.items() if wait <= timedelta()}
            active = [*active, *self._create_pods(job, due, newest)] if due else []
            kept -= due
            if due != set(waits):
                left = min(wait for index, wait in waits.items() if index not in due)
                self.soon(left.total_seconds(), self._look_later, uid)
        waiting = [pod for pod in newest.values() if is_over(pod) and index_of(pod) in kept]
        for pod in pods:
            if is_over(pod) and pod not in waiting:
                self._release(pod)
        have_ended = fails and all(map(is_over, newest.values()))
        counted = len(failed) - len(waiting)  # a pod counts once its finalizer is removed
        self._write_status(job, len(active), len(succeeded), counted, have_ended)

    def _create_pods(self, job: Body, due: set[str], newest: dict[str, Body]) -> list[Body]:
        failures = {
            index: failures_before(newest[index]) + 1 if index in newest else 0 for index in due
        }
        return [
            self.hands.create(PODS, self._pod(job, index, failures[index]))
            for index in sorted(due, key=int)
        ]

    def _waits(
        self, job: Body, newest: dict[str, Body], succeeded: set[str]
    ) -> dict[str, timedelta]:
        """How long each index without a pod, or whose pod has failed, waits for its next pod."""
        waits = {}
        for index in map(str, range(job["spec"]["completions"])):
            pod = newest.get(index)
            if pod is None and index not in succeeded:
                waits[index] = timedelta()
            elif pod is not None and pod["status"]["phase"] == "Failed":
                backoff = min(BACKOFF * 2 ** failures_before(pod), LONGEST_BACKOFF)
                waits[index] = ended_at(pod) + backoff - self._now()
        return waits

    def _look_later(self, uid: str) -> None:
        self.look(uid)  # a call of its own: `soon` merges calls, and a change must not wait

    def _pods_of(self, uid: str) -> Iterator[Body]:
        return (pod for pod in self.store.bodies(PODS) if uid in owners(pod))

    def _release(self, pod: Body) -> None:
        """Remove the finalizer of a pod."""
        if pod["metadata"].get("finalizers"):
            self.hands.patch(PODS, pod, {"metadata": {"finalizers": None}})

    def _write_status(
        self, job: Body, active: int, succeeded: int, failed: int, have_ended: bool
    ) -> None:
        """Write the status. have_ended: the Job has failed, and none of its pods is left."""
        status: Body = {"active": active, "succeeded": succeeded, "failed": failed}
        status["startTime"] = job.get("status", {}).get("startTime", self.time())
        if suspension := self._suspension(job):
            status["conditions"] = [suspension]
        if succeeded == job["spec"]["completions"]:
            status["conditions"] = [self._condition("Complete", "CompletionsReached")]
            status["completionTime"] = self.time()
        elif have_ended:
            status["conditions"] = [self._condition("Failed", "BackoffLimitExceeded")]
        if status != job.get("status"):
            self.hands.patch(JOBS, job, {"status": status}, "status")

    def _suspension(self, job: Body) -> Body | None:
        """The condition of a Job that is suspended, or has resumed."""
        conditions = job.get("status", {}).get("conditions", ())
        before: Body | None = next((c for c in conditions if c["type"] == "Suspended"), None)
        if job["spec"].get("suspend"):
            after = self._condition("Suspended", "JobSuspended")
        elif before is not None:
            after = {**self._condition("Suspended", "JobResumed"), "status": "False"}
        else:
            return None
        same = before is not None and before["status"] == after["status"]
        return before if same else after

    def _condition(self, kind: str, reason: str) -> Body:
        return {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": "terminated",
            "lastTransitionTime": self.time(),
        }

    def _pod(self, job: Body, index: str, failures: int | None = None) -> Body:
        """The next pod of an index. failures: how many pods it replaces, if the Job replaces pods."""
        meta, template = job["metadata"], job["spec"]["template"]
        template_meta = template["metadata"]
        labelled = {
            **template_meta["labels"],
            names.COMPLETION_INDEX_LABEL: index,
            names.CONTROLLER_UID_LABEL: meta["uid"],
        }
        annotated = {**template_meta.get("annotations", {}), names.COMPLETION_INDEX_LABEL: index}
        tracked = {}
        if failures is not None:
            annotated[names.FAILURE_COUNT] = str(failures)
            tracked["finalizers"] = [FINALIZER]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self._free_name(meta["namespace"], f"{meta['name']}-{index}"),
                "namespace": meta["namespace"],
                "labels": labelled,
                "annotations": annotated,
                "ownerReferences": [{**owner, "controller": True}],
                **tracked,
            },
            "spec": template["spec"],
        }

    def _free_name(self, namespace: str, prefix: str) -> str:
        """A pod name without random letters, so that runs are reproducible."""
        names = (f"{prefix}-{letters}" for letters in ("abcde", "bcdef", "cdefg", "defgh"))
        return next(n for n in names if self.store.get(PODS, (namespace, n)) is None)


def _finished(job: Body) -> bool:
    conditions = job.get("status", {}).get("conditions", ())
    return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)


def ended_at(pod: Body) -> datetime:
    """When the last container of a failed pod ended, or else when the pod was to end."""
    statuses = pod["status"].get("containerStatuses", ())
    ends = [
        each["state"]["terminated"]["finishedAt"]
        for each in statuses
        if "terminated" in each["state"]
    ]
    meta = pod["metadata"]
    return datetime.fromisoformat(
        max(ends, default=meta.get("deletionTimestamp", meta["creationTimestamp"]))
    )


def _terminates(pod: Body) -> bool:
    return "deletionTimestamp" in pod["metadata"]
