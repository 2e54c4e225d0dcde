"""A cluster as values: the responses that the checks of doctor read."""

from kubectl_torchrun.cluster.client import RequestError, Unreachable
from kubectl_torchrun.cluster.slices import Status
from kubectl_torchrun.doctor.snapshot import Answer, ClusterSnapshot
from torchrun_api.json import JsonObject, JsonValue

FORBIDDEN = RequestError(403, Status(message="you may not"))
MISSING = RequestError(404, Status(message="not found"))
BROKEN = Unreachable("connection lost")


def items(*objects: JsonObject) -> JsonObject:
    """A list of the API server."""
    return {"items": list(objects)}


def groups(*names: str) -> JsonObject:
    """The response of /apis."""
    return {"groups": [{"name": name} for name in names]}


def named(name: str, **parts: JsonValue) -> JsonObject:
    """An object with this name; `annotations` are of its metadata."""
    metadata: JsonObject = {"name": name}
    if "annotations" in parts:
        metadata["annotations"] = parts.pop("annotations")
    return {"metadata": metadata, **parts}


def queue(name: str = "q", **spec: JsonValue) -> JsonObject:
    """A TorchrunQueue with this spec."""
    return named(name, spec=spec)


def node(name: str = "n", **resources: str) -> JsonObject:
    """A Ready node with resources; `gpus` are of NVIDIA."""
    conditions: list[JsonValue] = [{"type": "Ready", "status": "True"}]
    gpus = {"nvidia.com/gpu": resources.pop("gpus")} if "gpus" in resources else {}
    return named(name, status={"allocatable": {**resources, **gpus}, "conditions": conditions})


def play(**answers: Answer) -> ClusterSnapshot:
    """A cluster without objects, with these responses; `_` stands for `-` in their names."""
    played: dict[str, Answer] = {
        "version": {"gitVersion": "v1.36.1"},
        "groups": groups("apps"),
        "cluster-autoscaler": MISSING,
        **{name: items() for name in ("nodes", "storageclasses", "claims", "deployments")},
        "queues": items(),
    }
    played |= {name.replace("_", "-"): answer for name, answer in answers.items()}
    return ClusterSnapshot("ns", played)
