"""The namespace of a user, and the actions of a kubelet in it."""

import uuid
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from gates import may_train
from integration.controller_process import Api, eventually
from torchrun_api import names

GROUP = "/apis/torchrun.ai/v1alpha1"
# No PVC is bound here, so by default a job would use direct delivery.
WORKSPACE = {"workspace": {"source": "zip", "delivery": "shared"}}

TERMINAL = ("Succeeded", "Failed", "TimedOut")
WORKERS = f"{names.COMPONENT_LABEL}={names.WORKER}"


class Team:
    """A namespace of its own, of any name by default."""

    def __init__(self, api: Api, name: str = "") -> None:
        name = name or f"team-{uuid.uuid4().hex[:8]}"
        self.api, self.name = api, name
        api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        self.core = f"/api/v1/namespaces/{name}"
        self.batch = f"/apis/batch/v1/namespaces/{name}"
        self.group = f"{GROUP}/namespaces/{name}"

    def make_queue(self, name: str = "research", **spec: object) -> None:
        body = {
            "apiVersion": "torchrun.ai/v1alpha1",
            "kind": "TorchrunQueue",
            "metadata": {"name": name},
            "spec": {"image": "trainer:1", "nodeResources": {"cpus": 1}, **spec},
        }
        self.api.create(f"{self.group}/torchrunqueues", body)

    def body(self, name: str, **spec: object) -> dict[str, Any]:
        """A TorchrunJob."""
        return {
            "apiVersion": "torchrun.ai/v1alpha1",
            "kind": "TorchrunJob",
            "metadata": {"name": name},
            "spec": {"jobQueue": "research", "numNodes": 2, "command": "python train.py", **spec},
        }

    def submit(self, name: str, **spec: object) -> Any:
        return self.api.create(f"{self.group}/torchrunjobs", self.body(name, **spec))

    def job(self, name: str) -> Any:
        return self.api.get(f"{self.group}/torchrunjobs/{name}")

    def status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = self.job(name).get("status", {})
        return status

    def reaches(self, name: str, phase: str, reason: str | None = None) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status = self.status(name)
            right = reason is None or status.get("reason") == reason
            return status if status.get("phase") == phase and right else None

        return eventually(f"{name} {phase} {reason or ''}", look)

    def has(self, path: str) -> Any:
        return eventually(path, lambda: self.api.get(path))

    def children(self, kind: str, job: str) -> list[str]:
        root = self.batch if kind == "jobs" else self.core
        items = self.api.items(f"{root}/{kind}", f"torchrun-job-name={job}")
        return sorted(item["metadata"]["name"] for item in items)

    def workers(self, job: str, count: int = 2) -> list[str]:
        """Names of the pods that the Job controller has created."""
        selector = f"{names.JOB_LABEL}={job},{WORKERS}"

        def look() -> list[str] | None:
            pods = [p["metadata"]["name"] for p in self.api.items(f"{self.core}/pods", selector)]
            return pods if len(pods) == count else None

        return eventually(f"{count} workers of {job}", look)

    def newest_gangs(self) -> dict[str, tuple[int, list[Any]]]:
        """For each job: the highest attempt with pods, and these pods."""
        gangs: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for pod in self.api.items(f"{self.core}/pods", WORKERS):
            labels = pod["metadata"]["labels"]
            gangs[labels[names.JOB_LABEL]][int(labels[names.ATTEMPT_LABEL])].append(pod)
        return {job: (max(attempts), attempts[max(attempts)]) for job, attempts in gangs.items()}

    def pod_becomes(self, pod: str, phase: str, message: str = "") -> None:
        status = pod_status(pod, phase, message)
        self.api.patch(f"{self.core}/pods/{pod}/status", {"status": status})


def trains(pod: Any, pods: Iterable[Any]) -> bool:
    """Whether its ranks may start and its containers run. `pods`: with the leader of its gang."""
    return pod["status"].get("phase") == "Running" and may_train(pod, pods)


def pod_status(pod: str, phase: str, message: str = "") -> dict[str, Any]:
    """A pod status as written by a kubelet."""
    state: dict[str, object] = {"running": {}}
    if phase in ("Succeeded", "Failed"):
        ended = {"exitCode": int(phase == "Failed"), "message": message, "reason": "Ended"}
        state = {"terminated": ended}
    container = {"name": "sync" if "-sync-" in pod else "trainer", "state": state}
    required = {"image": "i", "imageID": "i", "ready": phase == "Running", "restartCount": 0}
    return {"phase": phase, "containerStatuses": [container | required]}
