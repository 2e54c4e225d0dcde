"""The objects that the load creates: the same gang as a TorchrunJob, a JobSet and a plain Job."""

from torchrun_api.json import JsonObject

QUEUE: JsonObject = {"image": "bench/none", "nodeResources": {"cpus": 1, "memory": "1Gi"}}
WORKERS = "workers"  # the replicated job of a JobSet


def team(number: int) -> str:
    """The name of a namespace. All have the same length, see `crowd.py`."""
    return f"bench-team-{number:05d}"


def torchrun_job(name: str, nodes: int = 1) -> JsonObject:
    """A TorchrunJob without a workspace, in a queue with small requests."""
    return {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {"name": name},
        "spec": {"jobQueue": "bench", "numNodes": nodes, "command": "python train.py"},
    }


def torchrun_queue(namespace: str) -> JsonObject:
    """The queue of the jobs."""
    return {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunQueue",
        "metadata": {"name": "bench", "namespace": namespace},
        "spec": QUEUE,
    }


def jobset(name: str, nodes: int, *, service: bool) -> JsonObject:
    """A JobSet of one Job, with its headless Service or without.

    It has the defaults of JobSet's webhook, which the bench does not install.
    """
    replicated: JsonObject = {
        "name": WORKERS,
        "replicas": 1,
        "template": {"spec": _job_spec(f"{name}-{WORKERS}-0-0.{name}", nodes)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "replicatedJobs": [replicated],
            "failurePolicy": {"maxRestarts": 3},
            "successPolicy": {"operator": "All"},
            "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
            "network": {"enableDNSHostnames": service, "publishNotReadyAddresses": True},
        },
    }


def plain_job(name: str, namespace: str, uid: str, nodes: int) -> JsonObject:
    """The Job that a user writes by hand, owned by a TorchrunJob of this UID."""
    owner: JsonObject = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "name": name,
        "uid": uid,
        "controller": True,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace, "ownerReferences": [owner]},
        "spec": _job_spec(f"{name}-0.{name}", nodes),
    }


def _job_spec(master: str, nodes: int) -> JsonObject:
    rank = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    index: JsonObject = {"fieldRef": {"fieldPath": rank}}
    trainer: JsonObject = {
        "name": "trainer",
        "image": "bench/none",
        "command": ["torchrun", "train.py"],
        "env": [
            {"name": "PET_NNODES", "value": str(nodes)},
            {"name": "PET_NODE_RANK", "valueFrom": index},
            {"name": "PET_MASTER_ADDR", "value": master},
            {"name": "PET_MASTER_PORT", "value": "29500"},
        ],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    }
    return {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", "containers": [trainer]}},
    }
