"""Pods with the labels of a job but without its Job: orphaned workers and users' copies."""

from msgspec.structs import replace

from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.meta import OwnerReference
from torchrun_api.kinds.resources import JOBS, PODS
from world import World

# A possible one: the names of orphaned pods count.
SUFFIX = "bcdfg"


def orphan(world: World) -> None:
    del world.objects[JOBS.plural, "train"]
    for key, obj in list(world.objects.items()):
        if isinstance(obj, Pod):
            world.objects[key] = replace(obj, metadata=replace(obj.metadata, owner_references=()))


def add_copy(world: World, name: str, *owners: OwnerReference) -> None:
    """Another pod with the labels and annotations of a worker."""
    pod = world.workers()[0]
    meta = replace(pod.metadata, name=name, uid=f"uid-of-{name}", owner_references=owners)
    world.objects[PODS.plural, name] = replace(pod, metadata=meta)


def job_named(name: str) -> OwnerReference:
    """A Job that a user created."""
    return OwnerReference(
        api_version="batch/v1", kind="Job", name=name, uid=f"uid-of-{name}", controller=True
    )
