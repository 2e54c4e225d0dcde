"""The base of the simulated actors of a cluster, and its garbage collector.

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
QUARANTINE = 40.0  # seconds: quarantineTime of gc_controller.go


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


class PodCollector(Actor):
    """Ends pods whose Node object is gone, as gcOrphaned of gc_controller.go."""

    def changed(self, change: Change) -> None:
        if change.resource == NODES and change.verb == "DELETED":
            for pod in self.store.bodies(PODS):
                self.soon(QUARANTINE, self.collect, pod["metadata"]["uid"])

    def collect(self, uid: str) -> None:
        pod = self.find(PODS, uid)
        name = pod["spec"].get("nodeName") if pod is not None else None
        if pod is None or name is None or self.store.get(NODES, ("", name)) is not None:
            return
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByPodGC",
            "message": "PodGC: node no longer exists",
            "lastTransitionTime": self.time(),
        }
        if not is_over(pod):
            conditions = [*pod["status"].get("conditions", ()), condition]
            status = {"phase": "Failed", "conditions": conditions}
            self.hands.patch(PODS, pod, {"status": status}, "status")
        self.hands.delete(PODS, pod, grace=0)


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


def _target(resource: Resource, of: Body, subresource: str = "") -> Target:
    meta = of["metadata"]
    return Target(resource, meta.get("namespace", ""), meta["name"], subresource)
