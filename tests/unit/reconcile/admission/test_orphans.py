"""Gangs of deleted jobs, described by their own objects."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from admitting import running
from torchrun_api import names
from torchrun_api.core import Job, JobStatus, Pod
from torchrun_controller.reconcile.admission.orphans import orphaned_workloads
from unit.reconcile.admission.classifying import classify_world
from world import World, make_job, make_queue

JOB_CREATED = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
POD_CREATED = datetime(2026, 1, 1, 12, 5, tzinfo=UTC)
CHARGE = {"job": "uid-gone", "admission": {"queue": "gpu", "nodes": 1, "requests": {"cpu": "1"}}}


def _meta(name: str, created: datetime) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": "ml",
        "creationTimestamp": created.isoformat(),
        "labels": {names.JOB_LABEL: "train", names.COMPONENT_LABEL: names.WORKER},
        "annotations": {names.CHARGE: msgspec.json.encode(CHARGE).decode()},
    }


CHILD_JOB = msgspec.convert({"metadata": _meta("train", JOB_CREATED), "spec": {}}, Job)
POD = msgspec.convert({"metadata": _meta("train-0-bcdfg", POD_CREATED)}, Pod)


@pytest.mark.parametrize(("child_jobs", "since"), [((CHILD_JOB,), JOB_CREATED), ((), POD_CREATED)])
def test_an_orphaned_gang_is_as_old_as_its_job_or_as_its_pods(
    child_jobs: tuple[Job, ...], since: datetime
):
    (workload,) = orphaned_workloads("uid-new", child_jobs, (POD,), frozenset())
    assert (workload.uid, workload.is_deleted, workload.since) == ("uid-gone", True, since)


def test_a_gang_of_the_present_job_is_no_orphan():
    assert orphaned_workloads("uid-gone", (CHILD_JOB,), (POD,), frozenset()) == ()


def test_a_charge_that_cannot_be_read_is_no_workload():
    charge = {"job": "uid-gone", "admission": {"queue": "gpu", "nodes": 1, "gpus": -1}}
    meta = _meta("train", JOB_CREATED) | {
        "annotations": {names.CHARGE: msgspec.json.encode(charge).decode()}
    }
    child = msgspec.convert({"metadata": meta, "spec": {}}, Job)
    assert orphaned_workloads("uid-new", (child,), (POD,), frozenset()) == ()


def test_a_gang_without_running_pods_is_no_workload():
    meta = _meta("train-0-bcdfg", POD_CREATED)
    ended = msgspec.convert({"metadata": meta, "status": {"phase": "Failed"}}, Pod)
    assert orphaned_workloads("uid-new", (), (ended,), frozenset()) == ()


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
    (orphan,) = orphaned_workloads("", children, pods, frozenset())
    workload = classify_world(world).workload
    assert orphan.pods_by_node == workload.pods_by_node == {"n1": 1}


def test_an_orphaned_gang_from_before_the_quota_of_its_queue_uses_what_it_ran_with():
    """Later edits of job and queue change nothing."""
    world = World(make_job(numNodes=2), make_queue(nodeResources={"cpus": "8", "gpus": 8}))
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.queue = make_queue(quota={"nodes": 8}, nodeResources={"cpus": "4", "gpus": 4})
    world.settle()
    children, pods = world.observed().gang.child_jobs, tuple(world.workers())
    (orphan,) = orphaned_workloads("", children, pods, frozenset())
    assert (orphan.queue, orphan.admitted, orphan.gpus) == ("gpu", 2, 8)
    assert orphan.pod == {"pods": 1, "cpu": 8000, "nvidia.com/gpu": 8}


def _job(number: int = 0, role: str = "", **spec: object) -> Job:
    """A Job whose annotations say that its gang has many nodes."""
    meta = _meta(f"train-{number}{role}", JOB_CREATED)
    meta["labels"] |= {names.ATTEMPT_LABEL: str(number), names.ROLE_LABEL: role}
    meta["annotations"][names.NODES] = "1000"
    return msgspec.convert({"metadata": meta, "spec": spec}, Job)


def _admitted(*child_jobs: Job, pods: tuple[Pod, ...] = ()) -> int:
    workloads = orphaned_workloads("uid-new", child_jobs, pods, frozenset())
    return sum(workload.admitted for workload in workloads)


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        ({"parallelism": 3}, 3),
        ({"parallelism": 3, "completions": 2}, 2),
        ({"parallelism": 3, "completions": 5}, 3),
        ({"parallelism": 3, "suspend": True}, 0),
        ({"parallelism": 0}, 0),
    ],
)
def test_the_pods_that_a_job_may_create_are_charged(spec: dict[str, object], nodes: int):
    assert _admitted(_job(**spec)) == nodes
    assert _admitted(_job(**spec), pods=(POD,)) == max(nodes, 1)


def test_a_job_that_ends_creates_no_pods():
    failed = {"conditions": [{"type": "FailureTarget", "status": "True"}]}
    ending = msgspec.structs.replace(_job(parallelism=3), status=msgspec.convert(failed, JobStatus))
    assert _admitted(ending) == 0


def test_the_jobs_of_a_head_and_its_workers_count_together():
    earlier = _job(0, parallelism=9)
    assert _admitted(earlier, _job(1, parallelism=2), _job(1, names.HEAD, parallelism=1)) == 3


def test_without_a_head_its_pods_are_charged_as_workers():
    head = {"requests": {"cpu": "1"}, "gpus": 0}
    charge = {
        "job": "uid-gone",
        "admission": {"queue": "gpu", "requests": {"cpu": 8}, "head": head},
    }

    def with_head(child: Job) -> Job:
        annotations = msgspec.structs.replace(
            child.metadata.annotations, charge=msgspec.json.encode(charge).decode()
        )
        meta = msgspec.structs.replace(child.metadata, annotations=annotations)
        return msgspec.structs.replace(child, metadata=meta)

    workers, alone = with_head(_job(0)), with_head(_job(0, names.HEAD))
    for children, head_requests in (
        ((workers,), None),
        ((workers, alone), {"pods": 1, "cpu": 1000}),
    ):
        (workload,) = orphaned_workloads("", children, (), frozenset())
        assert workload.head == head_requests
