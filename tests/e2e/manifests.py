"""Queues and jobs of the tests."""

from torchrun_api.json import JsonObject, JsonValue

API_VERSION = "torchrun.ai/v1alpha1"


def queue(name: str, image: str, **spec: JsonValue) -> JsonObject:
    """A queue for small CPU jobs with a workspace of a few MiB."""
    defaults: JsonObject = {
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


def job(name: str, queue: str, command: JsonValue, nodes: int = 1, **spec: JsonValue) -> JsonObject:
    """A job whose command runs unchanged, without torchrun and workspace."""
    defaults: JsonObject = {
        "jobQueue": queue,
        "numNodes": nodes,
        "command": command,
        "launcher": "none",
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "TorchrunJob",
        "metadata": {"name": name},
        "spec": {**defaults, **spec},
    }


def zip_job(
    name: str, queue: str, command: JsonValue, nodes: int = 1, **spec: JsonValue
) -> JsonObject:
    """A job that waits for an upload of any content."""
    return job(name, queue, command, nodes, volumes={"workspace": {"source": "zip"}}, **spec)


def priority_class(name: str, value: int) -> JsonObject:
    """A PriorityClass."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
    }
