"""Golden QueuePlans: the trial, the objects and the status of a queue, stored beside the tests.

`pytest --update-golden` rewrites them. Read the diff before you commit it.
"""

from pathlib import Path

import msgspec
import pytest
import yaml

from queue_world import KAI, QueueWorld, a_job, kai_queue, make_trq
from torchrun_controller.reconcile.queue import QueuePlan

GOLDEN = Path(__file__).parents[1] / "golden" / "queues"
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"labels": {"team": "vision"}},
    "spec": {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "500Gi"}},
    },
}
SETTINGS = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"nccl.conf": "NCCL_DEBUG=WARN"}}


def plain() -> QueueWorld:
    return QueueWorld(make_trq())


def with_everything() -> QueueWorld:
    queue = make_trq(
        kaiQueue="vision",
        nodeResources={"gpus": 8, "cpus": 96, "memory": "512Gi"},
        quota={"gpus": 64, "memory": "4Ti"},
        weight=3,
        scheduling={"scheduler": "kai-scheduler"},
        resources=[
            {"name": "settings", "template": SETTINGS},
            {"name": "cache", "nameMode": "Exact", "immutable": True, "template": CLAIM},
            {"name": "secret", "template": {"apiVersion": "v1", "kind": "Secret"}},
        ],
    )
    world = QueueWorld(queue, KAI)
    assert world.kai is not None
    world.kai["default"] = kai_queue("default")
    world.jobs = [a_job("run", "Running", gang=True), a_job("waits")]
    return world


def terminating() -> QueueWorld:
    world = with_everything()
    world.settle()
    world.delete()
    return world


@pytest.mark.parametrize("make", [plain, with_everything, terminating])
def test_the_plan_of_a_queue(make, request):
    world = make()
    before = len(world.trials)
    plan: QueuePlan = world.step()
    text = yaml.safe_dump(
        {
            "trials": world.trials[before:],
            "applies": [msgspec.to_builtins(apply.body) for apply in plan.applies],
            "deletes": [f"{delete.kind.kind}/{delete.name}" for delete in plan.deletes],
            "status": msgspec.to_builtins(plan.status),
            "events": msgspec.to_builtins(plan.events),
        },
        sort_keys=False,
        width=100,
    )
    path = GOLDEN / f"{make.__name__.replace('_', '-')}.yaml"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
