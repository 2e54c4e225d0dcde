"""Bodies of TorchrunJobs and TorchrunQueues, and how the API server responds to them."""

import json
import subprocess
from typing import Any

from torchrun_cluster import LocalCluster

STARTED = {
    "phase": "Running",
    "numNodes": 2,
    "workers": {"pending": 0, "ready": 1, "running": 2, "failed": 0, "succeeded": 0},
    "workersStatus": "1/2 ready",
    "reason": "Starting",
}


def job(name: str = "a", **spec: Any) -> dict[str, Any]:
    wanted = {"jobQueue": "q", "numNodes": 2, "command": "python train.py", **spec}
    return {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {"name": name},
        "spec": {field: value for field, value in wanted.items() if value is not None},
    }


def rule(action: str, **matches: Any) -> dict[str, Any]:
    return {"action": action, **matches}


def queue(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunQueue",
        "metadata": {"name": "q"},
        "spec": spec,
    }


def dry_run(crds: LocalCluster, body: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return crds.kubectl(
        *("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-"),
        stdin=json.dumps(body),
        check=False,
    )


def refusal(crds: LocalCluster, body: dict[str, Any]) -> str:
    answer = dry_run(crds, body)
    assert answer.returncode != 0, answer.stdout
    return answer.stderr


def accepted(crds: LocalCluster, body: dict[str, Any]) -> dict[str, Any]:
    answer = dry_run(crds, body)
    assert answer.returncode == 0, answer.stderr
    stored: dict[str, Any] = json.loads(answer.stdout)
    return stored


def workspace(**fields: Any) -> dict[str, Any]:
    return job(volumes={"workspace": {"enabled": True, **fields}})


def git(**fields: Any) -> dict[str, Any]:
    return workspace(**{"source": "git", "url": "https://git.example/a.git", **fields})


def patch(crds: LocalCluster, name: str, body: object, *flags: str) -> str:
    """The error of the server; empty if it accepted the patch."""
    command = ("patch", "torchrunjob", name, "--type=merge", "-p", json.dumps(body), *flags)
    # Kubernetes 1.33 names the type in the place of the value.
    return crds.kubectl(*command, check=False).stderr.replace(' "object":', "")
