"""The containers that the controller adds to each worker pod: the trainer and the launcher."""

from torchrun_api import names
from torchrun_api.json import JsonObject, object_at, objects_at

LAUNCHER_RESOURCES: JsonObject = {"cpu": "100m", "memory": "64Mi"}


def container_of(pod: JsonObject, kind: str, name: str) -> JsonObject:
    """Return the container of this name, not a copy; `kind` is "containers" or "initContainers"."""
    return next(item for item in objects_at(pod, kind) if item.get("name") == name)


def set_launcher_resources(pod: JsonObject) -> None:
    """Give the launcher of a v1 PodSpec requests and limits for the same resources as the trainer.

    A ResourceQuota of CPU or memory refuses containers without them. A scheduler with its own
    quotas (Kueue) refuses resources that it does not know.
    """
    trainer = container_of(pod, "containers", names.TRAINER_CONTAINER)
    trainer_resources = object_at(trainer, "resources")
    resources: JsonObject = {}
    for kind in ("requests", "limits"):
        quantities: JsonObject = {
            name: quantity
            for name, quantity in LAUNCHER_RESOURCES.items()
            if name in object_at(trainer_resources, kind)
        }
        if quantities:
            resources[kind] = quantities
    if resources:
        launcher = container_of(pod, "initContainers", names.LAUNCHER_CONTAINER)
        launcher.setdefault("resources", resources)
