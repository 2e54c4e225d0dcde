"""What else lives in a cluster, as scripted actors: the garbage collector, the Job controller, a
scheduler and the kubelets.

They decide from the present state, a moment after each change, and see everything at once: nothing
here fails. What a pod's containers do is said by a `Script`.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

from msgspec import Struct

from faults.api_server import ApiServer, Target, Write, stamp
from faults.fields import Body
from faults.store import Change, Resource
from torchrun_api import names
from torchrun_controller.transport import ApiError

PODS: Resource = ("v1", "pods")
CLAIMS: Resource = ("v1", "persistentvolumeclaims")
JOBS: Resource = ("batch/v1", "jobs")
NODES: Resource = ("v1", "nodes")
NODE_COUNT = 4

COLLECTS, COUNTS, BINDS, STARTS, STOPS = 0.5, 0.1, 0.3, 0.5, 1.0  # seconds until each acts


class End(Struct, frozen=True):
    """How a pod's containers end, so many seconds after they began their work."""

    seconds: float
    exit_code: int = 0
    message: str = ""


Script = Callable[[Body], End | None]  # of a pod; None: it goes on for ever


class Hands:
    """Writes to the server, as one of its components."""

    def __init__(self, server: ApiServer, name: str) -> None:
        self.server = server
        self._name = name

    def create(self, resource: Resource, body: Body) -> Body:
        namespace = body["metadata"].get("namespace", "")
        return self._write("POST", Target(resource, namespace), body)

    def patch(self, resource: Resource, of: Body, patch: Body, subresource: str = "") -> None:
        """A merge patch of an object that may be gone."""
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
    """Looks at an object, or at the one that controls it, some time after it has changed."""

    def __init__(self, server: ApiServer, now: Callable[[], datetime], name: str) -> None:
        self.hands = Hands(server, name)
        self.store = server.store
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._waiting: set[tuple[str, Callable[[str], None]]] = set()
        self.store.subscribe(self.changed)

    def changed(self, change: Change) -> None:
        """To be overridden."""
        raise NotImplementedError

    def soon(self, seconds: float, look: Callable[[str], None], uid: str) -> None:
        """Have `look` called once, however often it is asked for meanwhile."""
        if (uid, look) not in self._waiting:
            self._waiting.add((uid, look))
            self._loop.call_later(seconds, self._look, uid, look)

    def _look(self, uid: str, look: Callable[[str], None]) -> None:
        self._waiting.discard((uid, look))
        look(uid)

    def find(self, resource: Resource, uid: str) -> Body | None:
        """The object with this UID, if it is there."""
        found = (b for b in self.store.bodies(resource) if b["metadata"]["uid"] == uid)
        return next(found, None)

    def time(self) -> str:
        return stamp(self._now())


class GarbageCollector(Actor):
    """Deletes what has owners of which none is there, in the background."""

    def changed(self, change: Change) -> None:
        if change.verb == "DELETED" or owners(change.body):
            self.soon(COLLECTS, self.collect, "all")

    def collect(self, _: str) -> None:
        everything = list(self.store.everything())
        present = {body["metadata"]["uid"] for _, body in everything}
        for resource, body in everything:
            held = owners(body)
            if held and not held & present and "deletionTimestamp" not in body["metadata"]:
                self.hands.delete(resource, body)


class JobController(Actor):
    """Indexed Jobs with backoffLimit 0: one pod an index, and the first failure ends it."""

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
        made = self._made.setdefault(uid, set())
        ended = [pods[i]["status"]["phase"] if i in pods else "Failed" for i in made]
        alive = [i for i in made if i in pods and not _over(pods[i])]
        failed = ended.count("Failed")
        if failed:
            for index in alive:
                if "deletionTimestamp" not in pods[index]["metadata"]:
                    self.hands.delete(PODS, pods[index])
        elif not job["spec"].get("suspend"):
            for index in map(str, range(job["spec"]["completions"])):
                if index not in made:
                    made.add(index)
                    self.hands.create(PODS, self._pod(job, index))
                    alive.append(index)
        self._tell(job, len(alive), ended.count("Succeeded"), failed)

    def _tell(self, job: Body, active: int, succeeded: int, failed: int) -> None:
        status = {"active": active, "succeeded": succeeded, "failed": failed}
        status["startTime"] = job.get("status", {}).get("startTime", self.time())
        if succeeded == job["spec"]["completions"]:
            status["conditions"] = [self._condition("Complete", "CompletionsReached")]
            status["completionTime"] = self.time()
        elif failed and not active:
            status["conditions"] = [self._condition("Failed", "BackoffLimitExceeded")]
        if status != job.get("status"):
            self.hands.patch(JOBS, job, {"status": status}, "status")

    def _condition(self, kind: str, reason: str) -> Body:
        said = {"type": kind, "status": "True", "reason": reason, "message": "as told"}
        return {**said, "lastTransitionTime": self.time()}

    def _pod(self, job: Body, index: str) -> Body:
        meta, template = job["metadata"], job["spec"]["template"]
        said = template["metadata"]
        labelled = {**said["labels"], names.COMPLETION_INDEX_LABEL: index}
        annotated = {**said.get("annotations", {}), names.COMPLETION_INDEX_LABEL: index}
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
        """Where the real one takes random letters, so that names are the same in each run."""
        found = (f"{prefix}-{letters}" for letters in ("abcde", "bcdef", "cdefg", "defgh"))
        return next(n for n in found if self.store.get(PODS, (namespace, n)) is None)


class Nodes(Actor):
    """The scheduler, which always finds a node, and the kubelets."""

    def __init__(self, server: ApiServer, now: Callable[[], datetime], script: Script) -> None:
        super().__init__(server, now, "kubelet")
        self._script = script
        self._working: set[str] = set()  # UIDs of pods whose containers have begun their work
        for number in range(NODE_COUNT):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": self.time()}
            node = {"metadata": {"name": f"node-{number}"}, "spec": {}}
            room = {"cpu": "8", "memory": "32Gi", "pods": "110"}
            status = {"conditions": [ready], "allocatable": room}
            body = {"apiVersion": "v1", "kind": "Node", **node, "status": status}
            self.hands.create(NODES, body)

    def changed(self, change: Change) -> None:
        if change.resource != PODS or change.verb == "DELETED":
            return
        uid, meta = change.body["metadata"]["uid"], change.body["metadata"]
        if "deletionTimestamp" in meta and change.body["spec"].get("nodeName"):
            self.soon(min(STOPS, meta["deletionGracePeriodSeconds"]), self.stop, uid)
        elif not change.body["spec"].get("nodeName"):
            self.soon(BINDS, self.bind, uid)
        elif change.body["status"]["phase"] == "Pending":
            self.soon(STARTS, self.start, uid)
        elif change.body["status"]["phase"] == "Running":
            self._work(change.body)

    def bind(self, uid: str) -> None:
        pod = self.find(PODS, uid)
        if pod is None or pod["spec"].get("nodeName"):
            return
        for volume in pod["spec"].get("volumes", ()):
            self._provide(pod, volume.get("persistentVolumeClaim", {}).get("claimName"))
        self.hands.patch(PODS, pod, {"spec": {"nodeName": f"node-{index_of(pod)}"}})
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self.time()}
        self.hands.patch(PODS, pod, {"status": {"conditions": [scheduled]}}, "status")

    def _provide(self, pod: Body, claim: str | None) -> None:
        """A volume for a claim that waits for its first consumer."""
        found = claim and self.store.get(CLAIMS, (pod["metadata"]["namespace"], claim))
        if found and found.body.get("status", {}).get("phase") != "Bound":
            self.hands.patch(CLAIMS, found.body, {"status": {"phase": "Bound"}}, "status")

    def start(self, uid: str) -> None:
        pod = self.find(PODS, uid)
        if pod is None or pod["status"]["phase"] != "Pending":
            return
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": self.time()}
        running = {"running": {"startedAt": self.time()}}
        self._say(pod, "Running", running, conditions=[*pod["status"].get("conditions", ()), ready])

    def _work(self, pod: Body) -> None:
        """Workers begin with their go-ahead, everything else at once."""
        meta = pod["metadata"]
        is_worker = meta["labels"].get(names.COMPONENT_LABEL) == names.WORKER
        told = meta.get("annotations", {}).get(names.START)
        if meta["uid"] in self._working or (is_worker and not told):
            return
        self._working.add(meta["uid"])
        end = self._script(pod)
        if end is not None:
            self._loop.call_later(end.seconds, self.end, meta["uid"], end)

    def end(self, uid: str, end: End) -> None:
        pod = self.find(PODS, uid)
        if pod is not None and not _over(pod):
            said = {"exitCode": end.exit_code, "message": end.message, "finishedAt": self.time()}
            self._say(pod, "Failed" if end.exit_code else "Succeeded", {"terminated": said})

    def stop(self, uid: str) -> None:
        """Containers get SIGTERM and end by it; then the pod goes."""
        self.end(uid, End(0, 143))
        pod = self.find(PODS, uid)
        if pod is not None:
            self.hands.delete(PODS, pod, grace=0)

    def _say(self, pod: Body, phase: str, state: Body, **more: Any) -> None:
        containers = [
            {"name": container["name"], "ready": phase == "Running", "state": state}
            for container in pod["spec"]["containers"]
        ]
        status = {"phase": phase, "containerStatuses": containers, "podIP": "10.0.0.7", **more}
        self.hands.patch(PODS, pod, {"status": status}, "status")


def owners(body: Body) -> set[str]:
    """UIDs of what owns an object."""
    return {owner["uid"] for owner in body["metadata"].get("ownerReferences", ())}


def index_of(pod: Body) -> str:
    """Completion index of a worker; of another pod its own number."""
    meta = pod["metadata"]
    label: str | None = meta.get("labels", {}).get(names.COMPLETION_INDEX_LABEL)
    return label or str(names.number_of(meta["name"]))


def _over(pod: Body) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _finished(job: Body) -> bool:
    said = job.get("status", {}).get("conditions", ())
    return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in said)


def _target(resource: Resource, of: Body, subresource: str = "") -> Target:
    meta = of["metadata"]
    return Target(resource, meta.get("namespace", ""), meta["name"], subresource)
