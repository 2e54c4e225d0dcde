"""The TorchrunJob of a call."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrun_sdk.cluster import kuberay
from torchrun_sdk.compute import Compute, Volume
from torchrun_sdk.spec import ENTRY, FOLDER, RAISED, Reference

# As in names that Kubernetes generates: no vowels (no words), no ambiguous letters.
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_LONGEST = 45  # characters of a job's name: names of its pods are longer
TTL_SECONDS = 3600  # a finished job is deleted after this time
# Label of a job: "pytorch", "ray", "function" (one pod) or APP.
LABEL = "torchrun.ai/sdk"
APP = "app"
# Label of a job with warm pods: a digest of the settings that a call must share with it.
GANG = "torchrun.ai/sdk-gang"
CONTAINER = "trainer"
# Label of a worker: the number of its gang, from 0.
ATTEMPT = "torchrun.ai/attempt"
_INDEX = "batch.kubernetes.io/job-completion-index"
# Label of a worker if the head has a separate Job: "head" or "worker".
_ROLE = "torchrun.ai/role"
# Phases that a job does not leave. A test compares them with torchrun_api.
TERMINAL_PHASES = ("Succeeded", "Failed", "TimedOut")
# Uses a variable that the controller sets in every pod.
_COMMAND = f'python3 "$TORCHRUN_WORKSPACE_TARGET/{FOLDER}/{ENTRY}"'


def job_name(function: str) -> str:
    """A job name with the name of the function: `train-fn-x7k2p`."""
    stem = re.sub(r"[^a-z0-9]+", "-", function.lower()).strip("-").lstrip("0123456789-")
    stem = stem[: _LONGEST - 6].strip("-") or "call"
    return f"{stem}-{''.join(secrets.choice(_LETTERS) for _ in range(5))}"


def workers_of(job: str) -> str:
    """Label selector of the pods of all gangs of a job."""
    return f"torchrun-job-name={job},app.kubernetes.io/component=worker"


def node_of(labels: dict[str, str]) -> int:
    """Number of a worker in its gang, from its labels; the head is 0."""
    index = int(labels.get(_INDEX, 0))
    return index + 1 if labels.get(_ROLE) == "worker" else index


def child_job(job: str, labels: dict[str, str]) -> str:
    """Name of the Job that a worker belongs to, from its labels; as in torchrun_api."""
    attempt = int(labels.get(ATTEMPT, 0))
    gang = f"{job}-r{attempt}" if attempt else job
    return f"{gang}-w" if labels.get(_ROLE) == "worker" else gang


def build(name: str, compute: Compute, key: str = "") -> dict[str, Any]:
    """The TorchrunJob for calls. The plugin adds namespace and workspace.

    key: value of the label GANG, "" without warm pods.
    """
    body = for_command(name, compute, _COMMAND)
    labels, spec = body["metadata"]["labels"], body["spec"]
    labels[LABEL] = compute.distribution.framework or "function"
    if key:
        labels[GANG] = key
    spec["launcher"] = "auto" if compute.distribution.framework == "pytorch" else "none"
    # Processes of a call that starts again in the same pods would repeat earlier calls.
    if compute.max_restarts:
        spec["reliability"]["rules"] = [{"exitCodes": [RAISED], "action": "fail"}]
        spec["reliability"]["restartScope"] = "Gang"
    return body


def gang_key(compute: Compute, function: Reference, root: Path) -> str:
    """The label for calls of a function of a directory with these resources and this package.

    With the host: in containers, as of notebooks, all users often have the same name and path.
    """
    parts = [
        build("", compute),
        kuberay.build("", "", compute, "") if compute.distribution.operator else None,
        function._replace(cell=""),
        str(root),
        _user(),
        socket.gethostname(),
        _version(),
    ]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container with a UID that has no name
        return str(os.getuid())


def _version() -> str:
    """The digest of the content of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def for_command(
    name: str, compute: Compute, command: str, ports: Sequence[int] = ()
) -> dict[str, Any]:
    """The TorchrunJob of a command."""
    spec: dict[str, Any] = {
        "jobQueue": compute.queue,
        "numNodes": compute.distribution.nodes,
        "nodeResources": compute.node_resources(),
        "command": command,
        "image": compute.resolved_image(),
        "env": compute.variables(),
        "podTemplate": _ports(ports),
    }
    spec = {field: value for field, value in spec.items() if value}
    head = compute.head_resources()
    if head is not None:
        spec["head"] = {"nodeResources": head}
    spec["reliability"] = {
        "maxRestarts": compute.max_restarts,
        "ttlSecondsAfterFinished": TTL_SECONDS,
    }
    spec["volumes"] = {"workspace": {"source": "zip"}, **_volumes(compute.volumes)}
    return {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {"name": name, "labels": {LABEL: APP}},
        "spec": spec,
    }


def _volumes(volumes: Sequence[Volume]) -> dict[str, Any]:
    if not volumes:
        return {}
    return {
        "additionalVolumes": [volume.in_pod() for volume in volumes],
        "additionalMounts": [volume.mount() for volume in volumes],
    }


def _ports(ports: Sequence[int]) -> dict[str, Any]:
    if not ports:
        return {}
    listed = [{"containerPort": port} for port in ports]
    return {"spec": {"containers": [{"name": CONTAINER, "ports": listed}]}}
