"""Simulated scheduler and kubelets.

A `Script` decides how the containers of a pod behave. Nodes can be lost, return and be switched
off. Containers on a lost machine keep running, unseen by the API server.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeAlias

from msgspec import Struct

from bodies import Body
from faults.api_server import ApiServer
from faults.cluster import (
    CLAIMS,
    NODES,
    PODS,
    SERVICES,
    Actor,
    index_of,
    is_over,
    is_worker,
)
from faults.store import Change
from gates import gang_of, may_train
from torchrun_api import names

NODE_COUNT = 4
BINDS, STARTS, STOPS = 0.3, 0.5, 1.0  # delay of each step in seconds


class End(Struct, frozen=True):
    """How the containers of a pod end, `seconds` after the start of their work.

    With `container` only that one ends, and the others of the pod become ready.
    """

    seconds: float
    exit_code: int = 0
    message: str = ""
    container: str = ""


Script: TypeAlias = Callable[[Body], End | None]  # the end of a pod; None if it never ends


class Nodes(Actor):
    """The scheduler and the kubelets.

    The scheduler prefers the node with the index of the worker. A node has room for any number of
    pods; with `alone`, for one worker.
    """

    def __init__(self, server: ApiServer, now: Callable[[], datetime], script: Script) -> None:
        super().__init__(server, now, "kubelet")
        self.alone = False
        # Workers that are deleted from the API, but whose containers may still run.
        self.unseen: list[Body] = []
        # What else happens at the start of the work of a pod, and the end that it has.
        self.begins: Callable[[Body], None] = lambda pod: None
        self.ends: Callable[[Body, End], End] = lambda pod, end: end
        self._script = script
        self._working: set[str] = set()  # UIDs of pods whose containers have started their work
        self._silent: set[str] = set()  # nodes with a silent kubelet
        self._missed: list[
            tuple[str, Callable[[str], None]]
        ] = []  # pending actions of silent kubelets
        self._unbound: set[str] = set()  # UIDs of pods without a node
        for number in range(NODE_COUNT):
            self.add(f"node-{number}")

    # Nodes

    def add(self, name: str) -> None:
        """Add a node."""
        room = {"cpu": "8", "memory": "32Gi", "pods": "110", "nvidia.com/gpu": "8"}
        status = {"conditions": [self._ready("True")], "allocatable": room}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}}
        self.hands.create(NODES, {**body, "status": status})

    def lose(self, name: str) -> None:
        """The kubelet becomes silent, and its containers keep running."""
        self._silent.add(name)
        self._patch(name, {"status": {"conditions": [self._ready("Unknown")]}}, "status")

    def come_back(self, name: str) -> None:
        """The kubelet returns, catches up, and kills containers without a pod in the API."""
        self._silent.discard(name)
        self._patch(name, {"status": {"conditions": [self._ready("True")]}}, "status")
        missed, self._missed = self._missed, []
        for uid, look in missed:
            self.soon(STOPS, look, uid)
        self._loop.call_later(STOPS, self._forget_unseen, name)

    def switch_off(self, name: str) -> None:
        """An administrator switches off a lost machine and taints it; its pods are force-deleted."""
        self._forget_unseen(name)
        taint = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute", "value": "off"}
        self._patch(name, {"spec": {"taints": [taint]}})
        for pod in list(self.store.bodies(PODS)):
            if pod["spec"].get("nodeName") == name:
                self._working.discard(pod["metadata"]["uid"])
                self.hands.delete(PODS, pod, grace=0)

    def remove(self, name: str) -> None:
        """Somebody deletes the Node object. Its kubelet and its containers are unseen from now on."""
        self._silent.add(name)
        self.hands.delete(NODES, {"metadata": {"name": name}})

    def power_off(self, name: str) -> None:
        """The machine of a node without an object is off, and its containers have ended."""
        self._forget_unseen(name)

    def cordon(self, name: str, *, closed: bool = True) -> None:
        """Cordon or uncordon a node."""
        self._patch(name, {"spec": {"unschedulable": closed}})

    def announce_end(self, name: str) -> None:
        """A termination handler cordons a machine that leaves, and taints it."""
        taint = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
        self._patch(name, {"spec": {"unschedulable": True, "taints": [taint]}})

    def _ready(self, status: str) -> Body:
        return {"type": "Ready", "status": status, "lastTransitionTime": self.time()}

    def _patch(self, name: str, patch: Body, subresource: str = "") -> None:
        self.hands.patch(NODES, {"metadata": {"name": name}}, patch, subresource)

    def _forget_unseen(self, name: str) -> None:
        self.unseen = [pod for pod in self.unseen if pod["spec"]["nodeName"] != name]

    # Pods

    def changed(self, change: Change) -> None:
        if change.resource == NODES:
            self._retry()
        elif change.resource == SERVICES:
            self._resolve()
        if change.resource != PODS:
            return
        if change.verb == "DELETED":
            self._removed(change.body)
            return
        uid, meta = change.body["metadata"]["uid"], change.body["metadata"]
        if "deletionTimestamp" in meta:
            if change.body["spec"].get("nodeName"):
                self.soon(min(STOPS, meta["deletionGracePeriodSeconds"]), self.stop, uid)
        elif not change.body["spec"].get("nodeName"):
            if uid not in self._unbound:
                self.soon(BINDS, self.bind, uid)
        elif change.body["status"]["phase"] == "Pending":
            self.soon(STARTS, self.start, uid)
        elif change.body["status"]["phase"] == "Running":
            for pod in self._gang(change.body):
                self._work(pod)
        elif change.body["spec"]["nodeName"] in self._silent:
            self._removed(change.body)  # the pod garbage collector has set its phase
        else:
            self._retry()

    def _resolve(self) -> None:
        """Start the ranks that waited for the Service of their gang."""
        for pod in list(self.store.bodies(PODS)):
            if is_worker(pod) and pod["status"]["phase"] == "Running":
                self._work(pod)

    def _removed(self, pod: Body) -> None:
        uid = pod["metadata"]["uid"]
        self._unbound.discard(uid)
        if pod["spec"].get("nodeName") in self._silent and uid in self._working:
            self._working.discard(uid)
            if is_worker(pod):
                self.unseen.append(pod)
        self._retry()

    def _retry(self) -> None:
        for uid in sorted(self._unbound):
            self.soon(BINDS, self.bind, uid)

    def bind(self, uid: str) -> None:
        pod = self.find(PODS, uid)
        if pod is None or pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
            return
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self.time()}
        node = next(self._free(pod), None)
        if node is None:
            why = {"status": "False", "reason": "Unschedulable", "message": "0/4 nodes available"}
            if uid not in self._unbound:
                self._unbound.add(uid)
                status = {"conditions": [{**scheduled, **why}]}
                self.hands.patch(PODS, pod, {"status": status}, "status")
            return
        self._unbound.discard(uid)
        for volume in pod["spec"].get("volumes", ()):
            self._provide(pod, volume.get("persistentVolumeClaim", {}).get("claimName"))
        self.hands.patch(PODS, pod, {"spec": {"nodeName": node}})
        self.hands.patch(PODS, pod, {"status": {"conditions": [scheduled]}}, "status")

    def _free(self, pod: Body) -> Iterator[str]:
        """Nodes where the pod may run, the preferred one first."""
        full = {
            other["spec"].get("nodeName")
            for other in self.store.bodies(PODS)
            if self.alone and takes_a_node(other) and takes_a_node(pod) and not is_over(other)
        }
        own = f"node-{index_of(pod)}"
        nodes = sorted(self.store.bodies(NODES), key=lambda node: node["metadata"]["name"] != own)
        for node in nodes:
            name, spec = node["metadata"]["name"], node["spec"]
            closed = spec.get("unschedulable") or spec.get("taints") or name in self._silent
            if not closed and name not in full:
                yield name

    def _provide(self, pod: Body, claim: str | None) -> None:
        """Bind a PVC that waits for its first consumer."""
        stored = claim and self.store.get(CLAIMS, (pod["metadata"]["namespace"], claim))
        if stored and stored.body.get("status", {}).get("phase") != "Bound":
            self.hands.patch(CLAIMS, stored.body, {"status": {"phase": "Bound"}}, "status")

    def start(self, uid: str) -> None:
        pod = self.find(PODS, uid)
        if pod is None or pod["status"]["phase"] != "Pending" or self._misses(pod, self.start):
            return
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": self.time()}
        running = {"running": {"startedAt": self.time()}}
        self._write_status(
            pod, "Running", running, conditions=[*pod["status"].get("conditions", ()), ready]
        )

    def reaches(self, pod: Body) -> bool:
        """Whether the machine of the pod is not lost."""
        return pod["spec"].get("nodeName") not in self._silent

    def _misses(self, pod: Body, look: Callable[[str], None]) -> bool:
        """Whether the kubelet of the pod is silent. It acts after its return."""
        silent = pod["spec"].get("nodeName") in self._silent
        if silent:
            self._missed.append((pod["metadata"]["uid"], look))
        return silent

    def _work(self, pod: Body) -> None:
        """Start the work: workers once their leader may start and is found, other pods at once.

        Real launchers also wait for each other. Without a gang scheduler, gangs that each have some
        of the nodes would wait for ever, as torchrun does.
        """
        if pod["metadata"]["uid"] in self._working or is_over(pod):
            return
        if is_worker(pod) and not (may_train(pod, self._gang(pod)) and self.finds_leader(pod)):
            return
        uid = pod["metadata"]["uid"]
        self._working.add(uid)
        self.begins(pod)
        end = self._script(pod)
        if end is not None:
            self._loop.call_later(end.seconds, self.end, uid, end)

    def finds_leader(self, pod: Body) -> bool:
        """Whether a Service resolves the pods of its gang; a gang of one pod needs none."""
        name = pod["spec"].get("subdomain")
        if not name:
            return True
        service = self.store.get(SERVICES, (pod["metadata"]["namespace"], name))
        labels = pod["metadata"]["labels"].items()
        return service is not None and service.body["spec"]["selector"].items() <= labels

    def _gang(self, pod: Body) -> list[Body]:
        """The pods of its gang; a pod that is no worker is alone."""
        if not is_worker(pod):
            return [pod]
        gang = gang_of(pod)
        pods = (other for other in self.store.bodies(PODS) if is_worker(other))
        return [other for other in pods if gang_of(other) == gang]

    def end(self, uid: str, end: End) -> None:
        pod = self.find(PODS, uid)
        if pod is None or is_over(pod) or self._misses(pod, lambda uid: self.end(uid, end)):
            return
        end = self.ends(pod, end)
        terminated = {"exitCode": end.exit_code, "message": end.message, "finishedAt": self.time()}
        phase = "Failed" if end.exit_code else "Succeeded"
        if end.container:
            self._write_status(
                pod, "Running", {"running": {}}, ended={end.container: {"terminated": terminated}}
            )
        else:
            self._working.discard(uid)
            self._write_status(pod, phase, {"terminated": terminated})

    def stop(self, uid: str) -> None:
        """Containers end after SIGTERM, and the pod is removed."""
        pod = self.find(PODS, uid)
        if pod is None or self._misses(pod, self.stop):
            return
        self.end(uid, End(0, 143))
        pod = self.find(PODS, uid)
        if pod is not None:
            self.hands.delete(PODS, pod, grace=0)

    def evict(self, pod: Body) -> None:
        """The kubelet evicts a pod, because the node lacks memory."""
        terminated = {"exitCode": 137, "finishedAt": self.time()}
        target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        why = {"message": "The node was low on memory.", "lastTransitionTime": self.time()}
        conditions = [*pod["status"].get("conditions", ()), {**target, **why}]
        state = {"terminated": terminated}
        self._working.discard(pod["metadata"]["uid"])
        self._write_status(pod, "Failed", state, conditions=conditions, reason="Evicted")

    def _write_status(
        self,
        pod: Body,
        phase: str,
        state: Body,
        ended: Mapping[str, Body] = MappingProxyType({}),
        **more: Any,
    ) -> None:
        containers = [
            {
                "name": container["name"],
                "ready": phase == "Running" and container["name"] not in ended,
                "state": ended.get(container["name"], state),
            }
            for container in pod["spec"]["containers"]
        ]
        status = {"phase": phase, "containerStatuses": containers, "podIP": "10.0.0.7", **more}
        self.hands.patch(PODS, pod, {"status": status}, "status")


def takes_a_node(pod: Body) -> bool:
    """Whether the pod needs a node alone, if nodes have room for one worker."""
    labels: Body = pod["metadata"].get("labels", {})
    return labels.get(names.COMPONENT_LABEL) == names.WORKER
