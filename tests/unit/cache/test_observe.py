"""Observed has only objects of the job, and the conflicting owners of its names."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import CoreEvent, Job, Node, PersistentVolumeClaim, Pod, Service
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.status import Attempt, Progress, UnfencedWorker
from torchrun_controller.cache.observe import (
    NODE_INDEX,
    Caches,
    empty_caches,
    observe,
)
from torchrun_controller.cache.progress_reports import Reports
from torchrun_controller.cache.store import Store
from torchrun_controller.reconcile import Conflict, Rejection
from world import START, make_job, make_queue

OURS = [{"kind": "TorchrunJob", "name": "train", "uid": "uid-train", "controller": True}]


@pytest.fixture
def caches() -> Caches:
    caches_of_test = empty_caches()
    caches_of_test.jobs.upsert(make_job(numNodes=1), 1)
    caches_of_test.queues.upsert(make_queue(), 1)
    return caches_of_test


def child(kind: type[Any], name: str, owners: list[Any], **labels: str) -> Any:
    return msgspec.convert(
        {
            "metadata": {
                "name": name,
                "namespace": "ml",
                "uid": f"uid-{name}",
                "labels": {names.JOB_LABEL: "train", **labels},
                "ownerReferences": owners,
            }
        },
        kind,
    )


def job_owner(name: str) -> dict[str, Any]:
    return {"kind": "Job", "name": name, "uid": f"uid-{name}", "controller": True}


def test_progress_is_of_the_latest_child_job_alone(caches):
    reports = Reports()
    caches.child_jobs.upsert(child(Job, "train", OURS, **{names.ATTEMPT_LABEL: "0"}), 1)
    reports.put(("ml", "train"), "uid-train", Progress(step=7))
    assert observe(caches, "ml", "train", reports=reports).gang.progress == Progress(step=7)
    caches.child_jobs.upsert(child(Job, "train-r1", OURS, **{names.ATTEMPT_LABEL: "1"}), 2)
    assert observe(caches, "ml", "train", reports=reports).gang.progress is None


def test_a_deleted_job_is_not_observed(caches):
    assert observe(caches, "ml", "other") is None


def test_the_queue_of_the_same_namespace_is_found(caches):
    seen = observe(caches, "ml", "train")
    assert seen.queue.metadata.name == "gpu"
    caches.queues.delete("ml", "gpu", 2)
    assert observe(caches, "ml", "train").queue is None


def test_children_are_ordered_by_number_and_workers_are_of_the_latest_attempt(caches):
    sync = {names.COMPONENT_LABEL: names.SYNC}
    for number in (10, 2, 0):
        caches.pods.upsert(child(Pod, f"train-sync-{number}", OURS, **sync), 1)
    for attempt in ("10", "9"):
        caches.child_jobs.upsert(
            child(Job, f"train-r{attempt}", OURS, **{names.ATTEMPT_LABEL: attempt}), 1
        )
        owner = [job_owner(f"train-r{attempt}")]
        worker = {names.COMPONENT_LABEL: names.WORKER, names.ATTEMPT_LABEL: attempt}
        for index in (1, 0):
            caches.pods.upsert(child(Pod, f"train-r{attempt}-{index}-x", owner, **worker), 1)
    seen = observe(caches, "ml", "train")
    assert [pod.metadata.name for pod in seen.workspace.sync_pods] == [
        "train-sync-0",
        "train-sync-2",
        "train-sync-10",
    ]
    assert [job.metadata.name for job in seen.gang.child_jobs] == ["train-r9", "train-r10"]
    assert [pod.metadata.name for pod in seen.gang.workers] == ["train-r10-0-x", "train-r10-1-x"]
    assert {pod.metadata.name for pod in seen.gang.stale_pods} == {"train-r9-0-x", "train-r9-1-x"}
    assert seen.refused.conflicts == ()


def test_the_workers_of_a_head_have_a_job_beside_its_own(caches):
    for attempt, name in (("0", "train"), ("1", "train-r1")):
        for role, job in ((names.HEAD, name), (names.WORKER, f"{name}-w")):
            labels = {names.ATTEMPT_LABEL: attempt, names.ROLE_LABEL: role}
            caches.child_jobs.upsert(child(Job, job, OURS, **labels), 1)
            owner = [job_owner(job)]
            labels[names.COMPONENT_LABEL] = names.WORKER
            caches.pods.upsert(child(Pod, f"{job}-0-x", owner, **labels), 1)
    seen = observe(caches, "ml", "train")
    assert [job.metadata.name for job in seen.gang.child_jobs] == ["train", "train-r1"]
    assert [job.metadata.name for job in seen.gang.worker_jobs] == ["train-w", "train-r1-w"]
    assert [pod.metadata.name for pod in seen.gang.workers] == ["train-r1-0-x", "train-r1-w-0-x"]
    assert {pod.metadata.name for pod in seen.gang.stale_pods} == {"train-0-x", "train-w-0-x"}
    caches.child_jobs.delete("ml", "train-r1", 2)
    left = observe(caches, "ml", "train")
    assert [pod.metadata.name for pod in left.gang.workers] == ["train-0-x", "train-w-0-x"]


def test_an_object_of_another_owner_is_a_conflict(caches):
    old = [{"kind": "TorchrunJob", "name": "train", "uid": "uid-before", "controller": True}]
    caches.child_jobs.upsert(child(Job, "train", old), 1)
    caches.services.upsert(child(Service, "train", []), 1)
    caches.claims.upsert(child(PersistentVolumeClaim, "train-workspace", OURS), 1)
    seen = observe(caches, "ml", "train")
    assert (seen.gang.child_jobs, seen.gang.service) == ((), None)
    assert [claim.metadata.name for claim in seen.workspace.claims] == ["train-workspace"]
    assert {(c.resource, c.name) for c in seen.refused.conflicts} == {
        ("jobs.batch", "train"),
        ("services", "train"),
    }
    assert "uid-before" in seen.refused.conflicts[0].message
    assert "no owner" in seen.refused.conflicts[1].message


def test_a_terminating_conflict_is_marked(caches):
    going = child(Service, "train", [])
    caches.services.upsert(going, 1)
    assert "being deleted" not in observe(caches, "ml", "train").refused.conflicts[0].message
    meta = msgspec.structs.replace(going.metadata, deletion_timestamp=START)
    caches.services.upsert(msgspec.structs.replace(going, metadata=meta), 2)
    assert "being deleted" in observe(caches, "ml", "train").refused.conflicts[0].message


def test_workers_of_a_deleted_job_are_stale_until_they_stop(caches):
    owner = [job_owner("train") | {"uid": "uid-of-another-time"}]
    pod = child(Pod, "train-0-x", owner, **{names.COMPONENT_LABEL: names.WORKER})
    caches.pods.upsert(pod, 1)
    seen = observe(caches, "ml", "train")
    assert (seen.gang.workers, seen.gang.stale_pods, seen.refused.conflicts) == ((), (pod,), ())
    stopped = msgspec.structs.replace(pod.status, phase="Failed")
    caches.pods.upsert(msgspec.structs.replace(pod, status=stopped), 2)
    assert observe(caches, "ml", "train").gang.stale_pods == ()
    condition = Condition(type="DisruptionTarget", status="True", reason="DeletionByPodGC")
    collected = msgspec.structs.replace(stopped, conditions=(condition,))
    caches.pods.upsert(msgspec.structs.replace(pod, status=collected), 3)
    (ghost,) = observe(caches, "ml", "train").gang.stale_pods
    assert ghost.status == collected, "no kubelet has reported its end"


def test_a_retained_claim_is_used_again(caches):
    retained = child(
        PersistentVolumeClaim, "train-checkpoints", [], **{names.RETAINED_LABEL: "train"}
    )
    caches.claims.upsert(retained, 1)
    seen = observe(caches, "ml", "train")
    assert seen.workspace.claims == (retained,)
    assert seen.refused.conflicts == ()


def test_conflicts_and_rejections_are_observed(caches):
    conflict = Conflict("jobs.batch", "train", "foreign")
    rejection = Rejection("jobs.batch", "train", "no")
    seen = observe(caches, "ml", "train", conflicts=(conflict,), rejections=(rejection,))
    assert seen.refused.conflicts == (conflict,)
    assert seen.refused.rejections == (rejection,)


def test_warnings_are_those_of_the_jobs_own_objects_in_the_order_of_time(caches):
    caches.claims.upsert(child(PersistentVolumeClaim, "train-workspace", OURS), 2)
    caches.child_jobs.upsert(child(Job, "train", OURS), 3)
    for number, (uid, time) in enumerate(
        [
            ("uid-train", "2026-01-02T03:04:07Z"),
            ("uid-train-workspace", "2026-01-02T03:04:06Z"),
            ("uid-other", "2026-01-02T03:04:05Z"),
            ("uid-train", None),
        ]
    ):
        event = {
            "metadata": {"name": f"e{number}", "namespace": "ml"},
            "involvedObject": {"uid": uid},
            "message": f"{number}",
            "lastTimestamp": time,
        }
        caches.warnings.upsert(msgspec.convert(event, CoreEvent), 4)
    seen = observe(caches, "ml", "train")
    assert [event.message for event in seen.cluster.warnings] == ["3", "1", "0"]


def a_node(name: str) -> Node:
    return msgspec.convert({"metadata": {"name": name}}, Node)


def test_only_nodes_of_pods_and_unfenced_workers_are_observed(caches):
    nodes: Store[Node] = Store()
    for name in ("of-a-pod", "of-an-unfenced", "of-a-failure", "of-a-worker", "of-nobody"):
        nodes.upsert(a_node(name), 1)
    worker = {names.COMPONENT_LABEL: names.WORKER}
    pod = child(Pod, "train-0-bcdfg", [], **worker)
    bound = replace(pod, spec=replace(pod.spec, node_name="of-a-pod"))
    caches.pods.upsert(bound, 2)
    caches.pods.upsert(
        replace(
            child(Pod, "train-1-bcdfg", [], **worker),
            spec=replace(pod.spec, node_name="gone"),
        ),
        2,
    )
    job = child(Job, "train", OURS)
    caches.child_jobs.upsert(job, 2)
    status = replace(
        make_job().status,
        unfenced=(UnfencedWorker(attempt=0, node="of-an-unfenced"),),
        attempts=(Attempt(number=0, node="of-a-failure"),),
        worker_nodes=("", "of-a-worker"),
    )
    caches.jobs.upsert(replace(make_job(), status=status), 2)
    seen = observe(caches, "ml", "train", nodes=nodes)
    assert set(seen.cluster.nodes) == {
        *("of-a-pod", "of-an-unfenced", "of-a-failure", "of-a-worker"),
    }
    assert observe(caches, "ml", "train").cluster.nodes is None
    assert caches.pods.by_index(NODE_INDEX, "of-a-pod") == (bound,)


@pytest.mark.parametrize("component", [names.SYNC, names.SETUP])
def test_the_node_and_the_warnings_of_a_helper_pod_matter(caches: Caches, component: str) -> None:
    nodes: Store[Node] = Store()
    nodes.upsert(a_node("node-1"), 1)
    pod = child(Pod, f"train-{component}-0", OURS, **{names.COMPONENT_LABEL: component})
    pod = replace(pod, spec=replace(pod.spec, node_name="node-1"))
    caches.pods.upsert(pod, 2)
    regarding = {
        "kind": "Pod",
        "namespace": "ml",
        "name": pod.metadata.name,
        "uid": pod.metadata.uid,
    }
    event = {"metadata": {"name": "e", "namespace": "ml"}, "involvedObject": regarding}
    caches.warnings.upsert(msgspec.convert(event, CoreEvent), 3)
    cluster = observe(caches, "ml", "train", nodes=nodes).cluster
    assert set(cluster.nodes or {}) == {"node-1"}
    assert [warning.metadata.name for warning in cluster.warnings] == ["e"]
    assert caches.pods.by_index(NODE_INDEX, "node-1") == (pod,)


def follower(name: str, *parents: str, **status: Any) -> TorchrunJob:
    spec = {"numNodes": 1, "dependsOn": [{"name": parent} for parent in parents]}
    body = {"metadata": {"name": name, "namespace": "ml"}, "spec": spec, "status": status}
    return msgspec.convert(body, TorchrunJob)


def test_parents_are_the_jobs_that_a_job_names_and_a_cycle_is_followed(caches):
    for job in (follower("c", "b", "gone"), follower("b", "a"), follower("a", "c")):
        caches.jobs.upsert(job, 1)
    elsewhere = replace(follower("gone"), metadata=replace(make_job().metadata, namespace="x"))
    caches.jobs.upsert(elsewhere, 1)
    observed = observe(caches, "ml", "c")
    assert observed is not None
    assert set(observed.parents) == {"b"}
    assert observed.waits_for == ("b", "a", "c")


def test_dependents_are_the_jobs_that_name_a_job(caches):
    for job in (follower("a"), follower("b", "a"), follower("c", "b"), follower("d", "x", "a")):
        caches.jobs.upsert(job, 1)
    observed = observe(caches, "ml", "a")
    assert observed is not None
    assert {job.metadata.name for job in observed.dependents} == {"b", "d"}


def test_node_local_checkpoints_need_every_node(caches):
    nodes: Store[Node] = Store()
    for name in ("one", "two"):
        nodes.upsert(a_node(name), 1)
    labels = {names.COMPONENT_LABEL: names.WORKER, names.JOB_LABEL: "other"}
    template = child(Pod, "other-0-abcde", [], **labels)
    for index, (node, size, phase) in enumerate(
        [("one", "5", "Running"), ("one", "7", "Running"), ("one", "9", "Failed"), ("", "3", "")]
    ):
        annotations = replace(template.metadata.annotations, local_checkpoints=size)
        meta = replace(template.metadata, name=f"other-{index}", annotations=annotations)
        status = replace(template.status, phase=phase or "Pending")
        spec = replace(template.spec, node_name=node)
        caches.pods.upsert(replace(template, metadata=meta, spec=spec, status=status), 2)
    plain = observe(caches, "ml", "train", nodes=nodes)
    assert plain is not None
    assert (plain.cluster.nodes, plain.cluster.promised) == ({}, {})
    caches.queues.upsert(make_queue(storage={"checkpoints": {"hostPath": "/var/c"}}), 2)
    seen = observe(caches, "ml", "train", nodes=nodes)
    assert seen is not None
    assert set(seen.cluster.nodes or ()) == {"one", "two"}
    assert seen.cluster.promised == {"one": 12}


def test_observe_does_not_read_every_pod(caches, monkeypatch):
    """With 100,000 pods, that would block the event loop for 20 ms in each reconcile."""
    iterated: list[object] = []
    iterate = Store.__iter__
    monkeypatch.setattr(Store, "__iter__", lambda self: iterated.append(self) or iterate(self))
    caches.queues.upsert(make_queue(storage={"checkpoints": {"hostPath": "/var/c"}}), 2)
    nodes: Store[Node] = Store()
    nodes.upsert(a_node("one"), 1)
    assert observe(caches, "ml", "train", nodes=nodes) is not None
    assert [store for store in iterated if store is not nodes] == []
