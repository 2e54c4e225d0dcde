"""No field of the users' documents is ignored silently.

Each field is removed and changed. At least one of the two must change the objects or the status,
for example the condition NotYetSupported.
"""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from queue_world import KAI, QueueWorld, kai_queue, make_trq
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.kai import KAI_POD_GROUPS
from world import World, make_job, make_queue

MISSION = Path(__file__).parents[2] / "fixtures" / "mission"
OTHER = {"zip": "none", "nccl": "gloo", "etcd-v2": "c10d"}

Fields = dict[str, Any]
Path_ = tuple[str, ...]


def specs(name: str) -> list[Fields]:
    text = (MISSION / f"{name}.yaml").read_text(encoding="utf-8")
    return [document["spec"] for document in yaml.safe_load_all(text)]


QUEUE = specs("queue-gpu-training-queue")[0]
H100 = specs("queue-h100-training")[0]
DEV, PROD = specs("queues-dev-and-prod")
MULTI_NODE = specs("job-multi-node-training")[0]
# What kubectl torchrun adds: "local workspace from kubectl-torchrun plugin is automatically mounted".
UPLOAD = {"volumes": {"workspace": {"source": "zip"}}}
PAIRS = {
    "multi-node-training": (MULTI_NODE, QUEUE),
    "training-job": (specs("job-training-job")[0] | UPLOAD, QUEUE),
    "vit-training": (specs("job-vit-training")[0] | UPLOAD, H100),
    "gpu-training-queue": (MULTI_NODE, QUEUE),
    "h100-training": (MULTI_NODE, H100),
    "dev-queue": (MULTI_NODE, DEV),
    "prod-queue": (MULTI_NODE, PROD),
}


def leaves(spec: Fields, path: Path_ = ()) -> Iterator[Path_]:
    for name, value in spec.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def cases() -> Iterator[Any]:
    for name, (job, queue) in PAIRS.items():
        for path in leaves({"job": job, "queue": queue}):
            # The queue is resolved before reconcile.
            if path != ("job", "jobQueue"):
                yield pytest.param(name, path, id=f"{name}:{'.'.join(path)}")


def edited(pair: Fields, path: Path_, *, remove: bool) -> Fields:
    copy = deepcopy(pair)
    parent = copy
    for name in path[:-1]:
        parent = parent[name]
    value = parent.pop(path[-1])
    if not remove:
        parent[path[-1]] = changed(value)
    return copy


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else OTHER.get(value, f"1{value}")


def outcome(pair: Fields) -> list[bytes]:
    """Every Plan from the submission to the gang."""
    job = {**pair["job"], "jobQueue": "gpu"}  # the name that make_queue sets
    world = World(make_job(**job), make_queue(**pair["queue"]))
    kai = (KAI_POD_GROUPS.api_version, KAI_POD_GROUPS.plural)
    world.installed = Installed(resources=frozenset({kai}))
    world.step()
    if world.observed().workspace.sync_pods:
        world.sync_done()
    world.step()
    return [
        *(
            msgspec.json.encode((p.status, p.events, [a.body for a in p.applies]))
            for p in world.plans
        ),
        kept_for(pair["queue"]),
    ]


def kept_for(queue: Fields) -> bytes:
    """The objects and the status of the queue."""
    world = QueueWorld(make_trq(**queue), KAI)
    assert world.kai is not None
    world.kai["default"] = kai_queue("default")
    plan = world.step()
    assert plan.status is not None
    of_kai = [c.message for c in plan.status.conditions if c.type == "KaiQueueReady"]
    return msgspec.json.encode(([a.body for a in plan.applies], of_kai))


@pytest.mark.parametrize(("name", "path"), list(cases()))
def test_every_field_shows(name: str, path: Path_) -> None:
    job, queue = PAIRS[name]
    pair = {"job": job, "queue": queue}
    as_written = outcome(pair)
    others = [outcome(edited(pair, path, remove=remove)) for remove in (True, False)]
    assert any(other != as_written for other in others)


def unsupported_message(name: str) -> str:
    """The fields of a document that the status of its job reports as not supported."""
    job, queue = PAIRS[name]
    world = World(make_job(**{**job, "jobQueue": "gpu"}), make_queue(**queue))
    kai = (KAI_POD_GROUPS.api_version, KAI_POD_GROUPS.plural)
    world.installed = Installed(resources=frozenset({kai}))
    world.step()
    world.sync_done()
    world.settle()
    conditions = world.job.status.conditions
    return next((c.message for c in conditions if c.type == "NotYetSupported"), "")


@pytest.mark.parametrize("name", list(PAIRS))
def test_fields_without_an_effect_are_named(name: str) -> None:
    backend = PAIRS[name][0].get("distributed", {}).get("rdzvBackend")
    assert ("distributed.rdzvBackend is etcd-v2" in unsupported_message(name)) is (
        backend == "etcd-v2"
    )
    assert bool(unsupported_message(name)) is (backend == "etcd-v2")
