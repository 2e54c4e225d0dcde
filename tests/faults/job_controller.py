"""Simulated Job controller for Indexed Jobs."""

from collections.abc import Callable
from datetime import datetime

from bodies import Body
from faults.api_server import ApiServer
from faults.cluster import COUNTS, JOBS, PODS, Actor, index_of, is_over, owners
from faults.store import Change
from torchrun_api import names
from torchrun_controller.reconcile.pods.head_and_workers import TRACKED


class JobController(Actor):
    """Indexed Jobs with backoffLimit 0: one pod for each index, and the first failure ends the Job."""

    def __init__(self, server: ApiServer, now: Callable[[], datetime]) -> None:
        super().__init__(server, now, "kube-controller-manager")
        self._made: dict[str, set[str]] = {}  # indexes by the Job's UID

    def changed(self, change: Change) -> None:
        if change.resource == JOBS:
            self.soon(COUNTS, self.look, change.body["metadata"]["uid"])
        elif change.resource == PODS:
            for uid in owners(change.body):
                self.soon(COUNTS, self.look, uid)

    def look(self, uid: str) -> None:
        job = self.find(JOBS, uid)
        if job is None or "deletionTimestamp" in job["metadata"] or _finished(job):
            return
        pods = {index_of(pod): pod for pod in self.store.bodies(PODS) if uid in owners(pod)}
        indexes = self._made.setdefault(uid, set())
        ended = [pods[i]["status"]["phase"] if i in pods else "Failed" for i in indexes]
        alive = [i for i in indexes if i in pods and not is_over(pods[i])]
        failed = ended.count("Failed")
        if job["spec"].get("suspend") and not failed:
            # Their deletion is no failure, unless somebody else has deleted them before.
            for index in alive:
                if "deletionTimestamp" not in pods[index]["metadata"]:
                    self.hands.patch(PODS, pods[index], {"metadata": {"finalizers": None}})
                    self.hands.delete(PODS, pods[index])
                    indexes.discard(index)
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

    def _pod(self, job: Body, index: str) -> Body:
        meta, template = job["metadata"], job["spec"]["template"]
        template_meta = template["metadata"]
        labelled = {
            **template_meta["labels"],
            names.COMPLETION_INDEX_LABEL: index,
            names.CONTROLLER_UID_LABEL: meta["uid"],
        }
        annotated = {**template_meta.get("annotations", {}), names.COMPLETION_INDEX_LABEL: index}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self._free_name(meta["namespace"], f"{meta['name']}-{index}"),
                "namespace": meta["namespace"],
                "labels": labelled,
                "annotations": annotated,
                "finalizers": [TRACKED],
                "ownerReferences": [{**owner, "controller": True}],
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
