"""Simulated garbage collector and Job controller.

They act on the current state, shortly after each change, without faults and stale caches.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime

from bodies import Body
from faults.api_server import ApiServer, Target, Write, stamp
from faults.store import Change, Resource
from torchrun_api import names
from torchrun_controller.client import ApiError

PODS: Resource = ("v1", "pods")
CLAIMS: Resource = ("v1", "persistentvolumeclaims")
SERVICES: Resource = ("v1", "services")
JOBS: Resource = ("batch/v1", "jobs")
NODES: Resource = ("v1", "nodes")
TORCHRUN_JOBS: Resource = ("torchrun.ai/v1alpha1", "torchrunjobs")
TORCHRUN_QUEUES: Resource = ("torchrun.ai/v1alpha1", "torchrunqueues")

COLLECTS, COUNTS = 0.5, 0.1  # reaction time of each in seconds


class Hands:
    """Writes to the server as one of its components."""

    def __init__(self, server: ApiServer, name: str) -> None:
        self.server = server
        self._name = name

    def create(self, resource: Resource, body: Body) -> Body:
        namespace = body["metadata"].get("namespace", "")
        return self._write("POST", Target(resource, namespace), body)

    def patch(self, resource: Resource, of: Body, patch: Body, subresource: str = "") -> None:
        """Patch an object, which may be deleted."""
        self._write("PATCH", _target(resource, of, subresource), patch)

    def delete(self, resource: Resource, of: Body, grace: int | None = None) -> None:
        options = {} if grace is None else {"gracePeriodSeconds": grace}
        self._write("DELETE", _target(resource, of), options)

    def _write(self, method: str, target: Target, body: Body) -> Body:
        try:
            content = "application/merge-patch+json"
            return self.server.write(Write(method, target, {}, body, content, self._name))
        except ApiError as error:
            if error.status != 404:
                raise
            return {}


class Actor:
    """Reacts to changes of an object, or of objects that it controls, after a delay."""

    def __init__(self, server: ApiServer, now: Callable[[], datetime], name: str) -> None:
        self.hands = Hands(server, name)
        self.store = server.store
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._waiting: set[tuple[str, Callable[[str], None]]] = set()
        self.store.subscribe(self.changed)

    def changed(self, change: Change) -> None:
        """React to a change; overridden by subclasses."""
        raise NotImplementedError

    def soon(self, seconds: float, look: Callable[[str], None], uid: str) -> None:
        """Schedule one call of `look`, also for several requests."""
        if (uid, look) not in self._waiting:
            self._waiting.add((uid, look))
            self._loop.call_later(seconds, self._look, uid, look)

    def _look(self, uid: str, look: Callable[[str], None]) -> None:
        self._waiting.discard((uid, look))
        look(uid)

    def find(self, resource: Resource, uid: str) -> Body | None:
        """The object with this UID, if it exists."""
        owners = (b for b in self.store.bodies(resource) if b["metadata"]["uid"] == uid)
        return next(owners, None)

    def time(self) -> str:
        return stamp(self._now())


class GarbageCollector(Actor):
    """Deletes objects without existing owners."""

    def changed(self, change: Change) -> None:
        if change.verb == "DELETED" or owners(change.body):
            self.soon(COLLECTS, self.collect, "all")

    def collect(self, _: str) -> None:
        everything = list(self.store.everything())
        present = {body["metadata"]["uid"] for _, body in everything}
        for resource, body in everything:
            uids = owners(body)
            if uids and not uids & present and "deletionTimestamp" not in body["metadata"]:
                self.hands.delete(resource, body)


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
        pods = {index_of(b): b for b in self.store.bodies(PODS) if uid in owners(b)}
        indexes = self._made.setdefault(uid, set())
        ended = [pods[i]["status"]["phase"] if i in pods else "Failed" for i in indexes]
        alive = [i for i in indexes if i in pods and not is_over(pods[i])]
        failed = ended.count("Failed")
        if failed:
            for index in alive:
                if "deletionTimestamp" not in pods[index]["metadata"]:
                    self.hands.delete(PODS, pods[index])
        elif not job["spec"].get("suspend"):
            for index in map(str, range(job["spec"]["completions"])):
                if index not in indexes:
                    indexes.add(index)
                    self.hands.create(PODS, self._pod(job, index))
                    alive.append(index)
        self._write_status(job, len(alive), ended.count("Succeeded"), failed)

    def _write_status(self, job: Body, active: int, succeeded: int, failed: int) -> None:
        status: Body = {"active": active, "succeeded": succeeded, "failed": failed}
        status["startTime"] = job.get("status", {}).get("startTime", self.time())
        if succeeded == job["spec"]["completions"]:
            status["conditions"] = [self._condition("Complete", "CompletionsReached")]
            status["completionTime"] = self.time()
        elif failed and not active:
            status["conditions"] = [self._condition("Failed", "BackoffLimitExceeded")]
        if status != job.get("status"):
            self.hands.patch(JOBS, job, {"status": status}, "status")

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
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": template["spec"],
        }

    def _free_name(self, namespace: str, prefix: str) -> str:
        """A pod name without random letters, so that runs are reproducible."""
        names = (f"{prefix}-{letters}" for letters in ("abcde", "bcdef", "cdefg", "defgh"))
        return next(n for n in names if self.store.get(PODS, (namespace, n)) is None)


def owners(body: Body) -> set[str]:
    """UIDs of the owners of an object."""
    return {owner["uid"] for owner in body["metadata"].get("ownerReferences", ())}


def index_of(pod: Body) -> str:
    """The completion index of a worker, or the number of another pod."""
    meta = pod["metadata"]
    label: str | None = meta.get("labels", {}).get(names.COMPLETION_INDEX_LABEL)
    return label or str(names.number_of(meta["name"]))


def is_worker(pod: Body) -> bool:
    """Whether the pod is a worker."""
    labels: Body = pod["metadata"].get("labels", {})
    return labels.get(names.COMPONENT_LABEL) == names.WORKER


def is_over(pod: Body) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _finished(job: Body) -> bool:
    conditions = job.get("status", {}).get("conditions", ())
    return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)


def _target(resource: Resource, of: Body, subresource: str = "") -> Target:
    meta = of["metadata"]
    return Target(resource, meta.get("namespace", ""), meta["name"], subresource)
