"""Queues and jobs that the tests use."""

from torchrun_api.json import JsonObject

API_VERSION = "torchrun.ai/v1alpha1"


def queue(name: str, image: str, **spec: object) -> JsonObject:
    """A queue for small CPU jobs with a workspace of a few MiB."""
    defaults = {
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "nodeResources": {"cpus": "50m", "memory": "128Mi"},
        "distributed": {"backend": "gloo"},
        "storage": {
            "workspace": {"enabled": True, "size": "32Mi"},
            "checkpoints": {"enabled": False},
        },
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "TorchrunQueue",
        "metadata": {"name": name},
        "spec": {**defaults, **spec},
    }


def job(name: str, queue: str, command: object, nodes: int = 1, **spec: object) -> JsonObject:
    """A job whose command runs as it is, without torchrun and without a workspace."""
    defaults = {"jobQueue": queue, "numNodes": nodes, "command": command, "launcher": "none"}
    return {
        "apiVersion": API_VERSION,
        "kind": "TorchrunJob",
        "metadata": {"name": name},
        "spec": {**defaults, **spec},
    }


def zip_job(name: str, queue: str, command: object, nodes: int = 1, **spec: object) -> JsonObject:
    """A job that waits for an upload of any content."""
    return job(name, queue, command, nodes, volumes={"workspace": {"source": "zip"}}, **spec)
