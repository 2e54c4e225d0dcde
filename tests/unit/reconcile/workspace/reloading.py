"""A gang whose workspace gets newer revisions."""

import json
from typing import Any

from msgspec.structs import replace

from torchrun_api import names
from world import ZIP, World, make_job, make_queue

TOKEN = "e" * 64


def annotate(world: World, **values: str) -> None:
    added = {f"torchrun.ai/{key.replace('_', '-')}": value for key, value in values.items()}
    meta = world.job.metadata
    world.job = replace(world.job, metadata=replace(meta, annotations=meta.annotations | added))


def revision_complete(world: World, revision: int, sha256: str) -> None:
    """The last sync pod succeeds."""
    pod = world.observed().workspace.sync_pods[-1].metadata.name
    message = json.dumps({"sha256": sha256, "files": 1, "bytes": 1, "revision": revision})
    world.end_container(pod, names.SYNC_CONTAINER, message=message, finished_at=world.now)
    world.pod(pod, phase="Succeeded")


def running(**spec: Any) -> World:
    world = World(make_job(numNodes=2, volumes=ZIP, **spec), make_queue())
    annotate(world, workspace_sha256="a" * 64, upload_token_sha256=TOKEN)
    world.settle()
    revision_complete(world, 1, "a" * 64)
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def body(world: World, kind: Any, name: str) -> Any:
    applies = [apply for plan in world.plans for apply in plan.applies]
    return next(a.body for a in reversed(applies) if a.kind is kind and a.name == name)


def variables(pod: Any) -> dict[str, str]:
    return {v["name"]: v.get("value", "") for v in pod["containers"][0]["env"]}


def syncing(world: World) -> list[str]:
    return [pod.metadata.name for pod in world.observed().workspace.sync_pods]


def revisions(world: World) -> set[str]:
    return {pod.metadata.annotations.revision for pod in world.leaders()}
