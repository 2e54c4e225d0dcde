"""Pods with the labels of a job that no gang of it created hold no charge and no room."""

import pytest
from msgspec.structs import replace

from admitting import running
from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.meta import OwnerReference
from torchrun_api.kinds.resources import PODS
from unit.reconcile.admission.classifying import classify_world
from unit.reconcile.orphaning import add_copy, job_named
from world import World

COPIES = pytest.mark.parametrize(
    ("name", "owners"),
    [
        ("my-debug-copy", ()),
        ("train-0-debug", ()),
        ("my-debug-hjklm", (job_named("my-debug"),)),
        ("train-0-hjklm", (replace(job_named("train"), kind="ReplicaSet"),)),
        ("train-0-hjklm", (replace(job_named("train"), kind="TorchrunJob"),)),
    ],
)
WORKERS = pytest.mark.parametrize(
    ("name", "owners"),
    [
        ("train-0-hjklm", ()),
        ("train-r7-w-0-hjklm", ()),
        ("any", (job_named("train"),)),
        ("any", (job_named("train-r7-w"),)),
    ],
)
Owners = tuple[OwnerReference, ...]


def placed(name: str, owners: Owners) -> World:
    """An admitted gang on n0 and n1, and another pod with its labels on n2."""
    world = running()
    for number, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"n{number}")
    add_copy(world, name, *owners)
    world.place(name, "n2")
    return world


def preempt(world: World) -> None:
    world.preempt()
    world.settle()
    world.containers_stop()
    world.settle()


@COPIES
def test_a_copy_does_not_keep_the_charge_of_a_preempted_job(name: str, owners: Owners) -> None:
    world = placed(name, owners)
    preempt(world)
    assert (PODS.plural, name) in world.objects
    assert classify_world(world).requeued


@COPIES
def test_a_copy_does_not_keep_the_charge_of_a_finished_job(name: str, owners: Owners) -> None:
    world = placed(name, owners)
    world.job_condition("Complete")
    for pod in world.workers():
        world.pod(pod.metadata.name, phase="Succeeded")
    world.settle()
    assert world.phase == "Succeeded"
    assert classify_world(world).workload is None


@COPIES
def test_a_copy_uses_no_room_of_its_job(name: str, owners: Owners) -> None:
    workload = classify_world(placed(name, owners)).workload
    assert (workload.admitted, workload.pods_by_node) == (2, {"n0": 1, "n1": 1})


@WORKERS
def test_a_worker_without_its_job_keeps_the_charge(name: str, owners: Owners) -> None:
    """It still trains: an orphan, or one that the garbage collector deletes."""
    world = placed(name, owners)
    assert classify_world(world).workload.pods_by_node == {"n0": 1, "n1": 1, "n2": 1}
    preempt(world)
    assert not classify_world(world).requeued
    world.vanish(name)
    world.settle()
    assert classify_world(world).requeued


def test_other_pods_of_a_job_are_no_workers() -> None:
    world = placed("any", (job_named("train"),))
    pod: Pod = world.objects[PODS.plural, "any"]
    labels = replace(pod.metadata.labels, component=names.SYNC)
    world.objects[PODS.plural, "any"] = replace(pod, metadata=replace(pod.metadata, labels=labels))
    assert classify_world(world).workload.pods_by_node == {"n0": 1, "n1": 1}
