"""A user's namespace, and what a kubelet would do in it."""

import uuid
from typing import Any

from integration.controller_process import Api, eventually

GROUP = "/apis/torchrun.ai/v1alpha1"
# Nothing binds claims here: left to itself a job would do without its one.
WORKSPACE = {"workspace": {"source": "zip", "delivery": "shared"}}


class Team:
    """A namespace of its own."""

    def __init__(self, api: Api) -> None:
        name = f"team-{uuid.uuid4().hex[:8]}"
        self.api, self.name = api, name
        api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        self.core = f"/api/v1/namespaces/{name}"
        self.batch = f"/apis/batch/v1/namespaces/{name}"
        self.group = f"{GROUP}/namespaces/{name}"

    def make_queue(self, **spec: object) -> None:
        body = {
            "apiVersion": "torchrun.ai/v1alpha1",
            "kind": "TorchrunQueue",
            "metadata": {"name": "research"},
            "spec": {"image": "trainer:1", "nodeResources": {"cpus": 1}, **spec},
        }
        self.api.create(f"{self.group}/torchrunqueues", body)

    def submit(self, name: str, **spec: object) -> Any:
        body = {
            "apiVersion": "torchrun.ai/v1alpha1",
            "kind": "TorchrunJob",
            "metadata": {"name": name},
            "spec": {"jobQueue": "research", "numNodes": 2, "command": "python train.py", **spec},
        }
        return self.api.create(f"{self.group}/torchrunjobs", body)

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
        """Names of the pods that the Job controller has made."""
        selector = f"torchrun-job-name={job},app.kubernetes.io/component=worker"

        def look() -> list[str] | None:
            pods = [p["metadata"]["name"] for p in self.api.items(f"{self.core}/pods", selector)]
            return pods if len(pods) == count else None

        return eventually(f"{count} workers of {job}", look)

    def pod_becomes(self, pod: str, phase: str, message: str = "") -> None:
        state: dict[str, object] = {"running": {}}
        if phase in ("Succeeded", "Failed"):
            ended = {"exitCode": int(phase == "Failed"), "message": message, "reason": "Ended"}
            state = {"terminated": ended}
        container = {"name": "sync" if "-sync-" in pod else "trainer", "state": state}
        required = {"image": "i", "imageID": "i", "ready": False, "restartCount": 0}
        status = {"phase": phase, "containerStatuses": [container | required]}
        self.api.patch(f"{self.core}/pods/{pod}/status", {"status": status})
