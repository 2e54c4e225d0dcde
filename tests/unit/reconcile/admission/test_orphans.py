"""Gangs of deleted jobs, described by their own objects."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from admitting import running
from torchrun_api import names
from torchrun_api.kinds.core import Job, Pod
from torchrun_controller.reconcile.admission.orphans import orphaned_workloads
from unit.reconcile.admission.classifying import classify_world
from world import World, make_job, make_queue

JOB_CREATED = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
POD_CREATED = datetime(2026, 1, 1, 12, 5, tzinfo=UTC)
SPEC = {"nodeName": "n", "containers": [{"resources": {"requests": {"cpu": "1"}}}]}


def _meta(name: str, created: datetime) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": "ml",
        "creationTimestamp": created.isoformat(),
        "labels": {
            names.JOB_LABEL: "train",
            names.JOB_UID_LABEL: "uid-gone",
            names.QUEUE_LABEL: "gpu",
            names.COMPONENT_LABEL: names.WORKER,
        },
    }


CHILD_JOB = msgspec.convert({"metadata": _meta("train", JOB_CREATED), "spec": {}}, Job)
POD = msgspec.convert({"metadata": _meta("train-0-bcdfg", POD_CREATED), "spec": SPEC}, Pod)


@pytest.mark.parametrize(("child_jobs", "since"), [((CHILD_JOB,), JOB_CREATED), ((), POD_CREATED)])
def test_an_orphaned_gang_is_as_old_as_its_job_or_as_its_pods(
    child_jobs: tuple[Job, ...], since: datetime
):
    (workload,) = orphaned_workloads("uid-new", child_jobs, (POD,), frozenset())
    assert (workload.uid, workload.is_deleted, workload.since) == ("uid-gone/0", True, since)


def test_a_gang_of_the_present_job_is_no_orphan():
    assert orphaned_workloads("uid-gone", (CHILD_JOB,), (POD,), frozenset()) == ()


@pytest.mark.parametrize(
    ("change", "is_charged"),
    [
        ({}, True),
        ({"phase": "Failed"}, False),
        ({"node": ""}, False),
        ({"node": "lost"}, False),
        ({"name": "copy"}, False),
        ({"job_uid": ""}, False),
    ],
)
def test_only_pods_of_gangs_that_use_a_node_are_charged(change: dict[str, str], is_charged: bool):
    meta = _meta(change.get("name", "train-0-bcdfg"), POD_CREATED)
    meta["labels"][names.JOB_UID_LABEL] = change.get("job_uid", "uid-gone")
    spec = {**SPEC, "nodeName": change.get("node", "n")}
    phase = change.get("phase", "Running")
    pod = msgspec.convert({"metadata": meta, "spec": spec, "status": {"phase": phase}}, Pod)
    workloads = orphaned_workloads("", (CHILD_JOB,), (pod,), frozenset({"lost"}))
    assert [workload.pod for workload in workloads] == [{"pods": 1, "cpu": 1000}] * is_charged


def test_an_orphaned_gang_uses_the_same_room_as_before():
    """The head has less than a worker, so its node has room for a worker."""
    world = running(
        {"quota": {"nodes": 8}, "nodeResources": {"cpus": "8", "gpus": 8}},
        numNodes=2,
        head={"nodeResources": {"gpus": 0, "cpus": "1"}},
    )
    for number, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"n{number}")
    children, pods = world.observed().gang.child_jobs, tuple(world.workers())
    head, workers = orphaned_workloads("", children, pods, frozenset())
    workload = classify_world(world).workload
    assert workers.pods_by_node == workload.pods_by_node == {"n1": 1}
    assert (head.pod, head.pods_by_node) == (workload.head, {"n0": 1})


def test_an_orphaned_gang_from_before_the_quota_of_its_queue_uses_what_it_ran_with():
    """Later edits of job and queue change nothing."""
    world = World(make_job(numNodes=2), make_queue(nodeResources={"cpus": "8", "gpus": 8}))
    world.settle()
    for pod in world.workers():
        world.place(pod.metadata.name, "n0")
    world.all_workers("Running")
    world.settle()
    world.queue = make_queue(quota={"nodes": 8}, nodeResources={"cpus": "4", "gpus": 4})
    world.settle()
    children, pods = world.observed().gang.child_jobs, tuple(world.workers())
    (orphan,) = orphaned_workloads("", children, pods, frozenset())
    assert (orphan.queue, orphan.admitted) == ("gpu", 2)
    assert orphan.pod == {"pods": 1, "cpu": 8000, "nvidia.com/gpu": 8}
