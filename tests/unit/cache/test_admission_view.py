"""The state that the coordinator sees, and the changes that wake it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from torchrun_api.core import Job, JobStatus, Node, NodeSpec, Pod, Taint
from torchrun_api.job import TorchrunJob
from torchrun_api.meta import Condition
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.cache.admission_view import (
    ADMISSION,
    COALESCE,
    AdmissionView,
    ObservedAdmission,
)
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.read_errors import ReadErrors
from torchrun_controller.clock import Clock
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.pods.nodes import OUT_OF_SERVICE
from torchrun_controller.reconcile.spec.requests import GangRequests, encode_charge
from torchrun_controller.workqueue import WorkQueue

GPU = "nvidia.com/gpu"
NEVER_SENT: Any = None  # without running informers
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
THEN = "2026-01-02T03:04:00Z"


class World:
    def __init__(self, *, by_nodes: bool = True, **options: Any) -> None:
        self.time = 0.0
        metrics = Metrics(CollectorRegistry())
        keys: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        self.work: WorkQueue[str] = WorkQueue(lambda: self.time)
        still = Clock(monotonic=lambda: 0.0)
        answers = ReadErrors(metrics.observe_request)
        self.factory = InformerFactory(NEVER_SENT, answers, keys, clock=still)
        self.watch = AdmissionView(self.factory, self.work, by_nodes=by_nodes, **options)
        self.factory.nodes.informer.synced.set()
        self.version = 0

    def change(self, obj: Any, *, gone: bool = False) -> None:
        """Update the store, then call the handler, as the informer does."""
        self.version += 1
        for informer in self.factory.informers:
            if informer.kind.type is type(obj):
                if gone:
                    meta = obj.metadata
                    change = informer.store.delete(meta.namespace, meta.name, self.version)
                else:
                    change = informer.store.upsert(obj, self.version)
                assert change is not None
                informer._on_change(change, False)

    def awake(self) -> bool:
        """Whether the key is ready after the batching delay; takes the key."""
        self.time += COALESCE
        key = self.work.get()
        if key is not None:
            assert key == ADMISSION
            self.work.done(key)
        return key is not None

    def seen(self, now: datetime = NOW) -> ObservedAdmission:
        found = self.watch.observe(now)
        assert found is not None
        return found


@pytest.fixture
def world() -> World:
    return World()


def a_queue(name: str = "lab", generation: int = 1, **spec: object) -> TorchrunQueue:
    meta = {"name": name, "namespace": "team", "uid": name, "generation": generation}
    return msgspec.convert({"metadata": meta, "spec": spec}, TorchrunQueue)


def a_job(name: str = "run", version: int = 1, **status: object) -> TorchrunJob:
    asks = {"type": "AdmissionRequested", "status": "True", "reason": "WaitingForAdmission"}
    body = {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
        },
        "spec": {"jobQueue": "lab", "numNodes": 2, "command": "c"},
        "status": status if "phase" in status else {**status, "conditions": [asks]},
    }
    return msgspec.convert(body, TorchrunJob)


def a_gang(job: str = "run") -> Job:
    owner = {"kind": "TorchrunJob", "name": job, "uid": f"uid-{job}", "controller": True}
    labels = {"torchrun-job-name": job, "torchrun.ai/attempt": "0"}
    meta = {"name": job, "namespace": "team", "uid": f"gang-{job}", "labels": labels}
    body = {"metadata": {**meta, "ownerReferences": [owner]}, "spec": {"completions": 2}}
    return msgspec.convert(body, Job)


def a_pod(index: int = 0, job: str = "run", phase: str = "Running", node: str = "n") -> Pod:
    labels = {
        "torchrun-job-name": job,
        "app.kubernetes.io/component": "worker",
        "torchrun.ai/attempt": "0",
    }
    body = {
        "metadata": {
            "name": f"{job}-{index}",
            "namespace": "team",
            "labels": labels,
            "ownerReferences": [{"kind": "Job", "uid": f"gang-{job}", "controller": True}],
        },
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }
    return msgspec.convert(body, Pod)


def a_node(name: str = "n", ready: str = "True", **allocatable: str) -> Node:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": THEN}
    status = {"conditions": [condition], "allocatable": allocatable}
    return msgspec.convert({"metadata": {"name": name}, "status": status}, Node)


ADMITTED_STATUS = {
    "admission": {"nodes": 2, "time": THEN},
    "phase": "Running",
    "reason": "WorkersRunning",
}


def test_nothing_wakes_it_without_a_queue_with_admission(world: World) -> None:
    world.change(a_queue())
    world.change(a_job())
    world.change(a_gang())
    world.change(a_node())
    assert not world.awake()


def test_an_admitted_job_wakes_it_without_a_queue(world: World) -> None:
    world.change(a_job(**ADMITTED_STATUS))
    assert world.awake()
    assert [entry.classification.workload.admitted for entry in world.seen().entries] == [2]


class TestWaking:
    """Only relevant changes wake it, once for all changes within the batching delay."""

    @pytest.fixture(autouse=True)
    def _with_a_queue(self, world: World) -> None:
        world.change(a_queue(quota={"nodes": 4}))
        world.change(a_job())
        world.change(a_pod())
        world.change(a_node(cpu="4"))
        assert world.awake()
        assert not world.awake()

    def test_jobs(self, world: World) -> None:
        world.change(a_job(version=2, workersStatus="1/2 ready"))
        assert not world.awake()
        world.change(a_job(version=3, reason="Completed", phase="Succeeded"))
        assert world.awake()
        world.change(a_job(version=3), gone=True)
        assert world.awake()

    def test_gangs_and_their_nodes(self, world: World) -> None:
        world.change(a_pod(phase="Running"))
        assert not world.awake()
        world.change(a_pod(phase="Succeeded"))
        assert world.awake()
        world.change(a_gang())
        assert world.awake()

    def test_queues_without_their_status(self, world: World) -> None:
        world.change(a_queue(quota={"nodes": 4}))
        assert not world.awake()
        world.change(a_queue(generation=2, quota={"nodes": 5}))
        assert world.awake()
        world.change(a_queue(generation=2), gone=True)
        assert not world.awake(), "no other queue has admission"

    def test_nodes_without_their_heartbeats(self, world: World) -> None:
        world.change(a_node(cpu="4"))
        assert not world.awake()
        world.change(a_node(cpu="5"))
        assert world.awake()
        world.factory.nodes._notify(None)
        assert world.awake(), "nodes become known or unknown"


def test_the_state_follows_the_caches(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job())
    world.change(a_node(cpu="4"))
    state = world.seen().state
    assert [(r.name, r.nodes, r.admitted) for r in state.workloads] == [("run", 2, 0)]
    assert [queue.name for queue in state.queues] == ["lab"]
    assert state.nodes is not None
    assert state.nodes[0].allocatable == {"cpu": 4000}
    world.change(a_job(version=2, **ADMITTED_STATUS))
    world.change(a_gang())
    world.change(a_pod(0))
    world.change(a_pod(1, node="other"))
    (request,) = world.seen().state.workloads
    assert (request.admitted, request.pods_by_node) == (2, {"n": 1, "other": 1})
    world.change(a_job(version=2), gone=True)
    world.change(a_gang(), gone=True)
    world.change(a_pod(0), gone=True)
    world.change(a_pod(1), gone=True)
    assert world.seen().state.workloads == ()


CHARGE = encode_charge(
    "uid-run", GangRequests(nodes=2, pod={"pods": 1, GPU: 8}, gpus=8), queue="lab"
)


def charged(child: Any, charge: str = CHARGE, **meta: object) -> Any:
    """The object with the charge of its gang in an annotation."""
    annotations = replace(child.metadata.annotations, charge=charge)
    return replace(child, metadata=replace(child.metadata, annotations=annotations, **meta))


def test_pods_of_a_deleted_job_are_charged_until_they_end(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(**ADMITTED_STATUS))
    world.change(charged(a_gang()))
    world.change(charged(a_pod(0)))
    (request,) = world.seen().state.workloads
    assert (request.uid, request.is_deleted) == ("uid-run", False)
    world.change(a_job(**ADMITTED_STATUS), gone=True)
    world.change(charged(a_gang()), gone=True)
    (request,) = world.seen().state.workloads
    assert (request.name, request.admitted, request.gpus, request.is_deleted) == ("run", 2, 8, True)
    other = a_job(version=9)  # a waiting job with the same name
    world.change(replace(other, metadata=replace(other.metadata, uid="uid-other")))
    assert [r.admitted for r in world.seen().state.workloads] == [2, 0]
    world.change(charged(a_pod(0)), gone=True)
    (request,) = world.seen().state.workloads
    assert request.admitted == 0


@pytest.mark.parametrize("left", ["the child Job", "a pod"])
def test_a_restarted_controller_charges_pods_of_deleted_jobs(world: World, left: str) -> None:
    """The new process never saw the job."""
    world.change(a_queue(quota={"nodes": 4}))
    world.change(charged(a_gang() if left == "the child Job" else a_pod(1, node="n")))
    (request,) = world.seen().state.workloads
    assert (request.queue, request.admitted, request.uid) == ("lab", 2, "uid-run")
    assert request.pod == {"pods": 1, GPU: 8}
    assert request.pods_by_node == ({} if left == "the child Job" else {"n": 1})


def test_pods_of_a_deleted_job_do_not_belong_to_a_new_one_of_its_name(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    other = a_job(version=9, **ADMITTED_STATUS)
    world.change(replace(other, metadata=replace(other.metadata, uid="uid-other")))
    world.change(charged(a_pod(0, node="n")))
    state = world.seen().state
    assert {r.uid: r.pods_by_node for r in state.workloads} == {
        "uid-run": {"n": 1},
        "uid-other": {},
    }


@pytest.mark.parametrize(
    "value",
    [
        "{",
        "[]",
        "{}",
        '{"job": "x"}',
        '{"job": "x", "admission": {"nodes": 1, "queue": "lab", "gpus": -8}}',
        '{"job": "x", "admission": {"nodes": 1, "queue": "lab", "requests": {"cpu": "-1"}}}',
        '{"job": "x", "admission": {"queue": "lab", "head": {"gpus": -1}}}',
    ],
)
def test_an_invalid_charge_is_ignored(world: World, value: str) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(charged(a_pod(0), value))
    assert world.seen().state.workloads == ()


def test_a_gang_without_running_pods_is_not_charged(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(charged(a_pod(0, phase="Succeeded")))
    assert world.seen().state.workloads == ()


@pytest.mark.parametrize("verdict", ["Failed", "FailureTarget"])
def test_pods_on_lost_nodes_do_not_block_admission(world: World, verdict: str) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_node(ready="Unknown"))
    world.change(a_job(**{**ADMITTED_STATUS, "phase": "Failed"}))
    ending = JobStatus(conditions=(Condition(type=verdict, status="True"),))
    world.change(replace(a_gang(), status=ending))
    world.change(a_pod(0))
    seen = world.seen()
    assert seen.next_lost_node == 35
    assert [r.admitted for r in seen.state.workloads] == [2]
    later = world.seen(NOW + timedelta(seconds=36))
    assert later.state.workloads == ()
    assert later.next_lost_node is None


def test_pods_on_nodes_that_are_out_of_service_do_not_block_admission(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(**{**ADMITTED_STATUS, "phase": "Failed"}))
    world.change(a_pod(0))
    world.change(a_node())
    assert [r.admitted for r in world.seen().state.workloads] == [2]
    taint = Taint(key=OUT_OF_SERVICE, value="nodeshutdown", effect="NoExecute")
    world.change(replace(a_node(), spec=NodeSpec(taints=(taint,))))
    seen = world.seen()
    assert seen.state.workloads == ()
    assert seen.next_lost_node is None


def test_admission_waits_for_nodes_unless_they_are_forbidden(world: World) -> None:
    world.factory.nodes.informer.synced = anyio.Event()
    assert world.watch.observe(NOW) is None
    world.factory.read_errors.observe("list", "nodes", 403, 0.1)
    assert world.seen().state.nodes is None


@pytest.mark.parametrize("code", [0, 401, 410, 429, 500, 503])
@pytest.mark.parametrize("known", [False, True])
def test_admission_waits_for_nodes_while_the_server_fails(
    world: World, code: int, known: bool
) -> None:
    """A short outage of the server must not make admission ignore nodes."""
    if known:
        world.factory.nodes.informer.last_seen -= 1000
    else:
        world.factory.nodes.informer.synced = anyio.Event()
    world.factory.read_errors.observe("list", "nodes", code, 0.1)
    assert world.watch.observe(NOW) is None
    assert "admission by nodes waits" in world.factory.nodes.shortcoming()


def test_quota_alone_does_not_wait_for_nodes() -> None:
    world = World(by_nodes=False)
    world.factory.nodes.informer.synced = anyio.Event()
    assert world.seen().state.nodes is None


def test_requests_of_other_pods_reduce_the_capacity() -> None:
    world = World(node_overhead={"cpu": 1500, "memory": 4 << 30})
    world.change(a_node(cpu="4", memory="1Gi", pods="110"))
    (machine,) = world.seen().state.nodes or ()
    assert machine.allocatable == {"cpu": 2500, "memory": 0, "pods": 110}


def test_nodes_can_be_ignored() -> None:
    world = World(by_nodes=False)
    world.change(a_node(cpu="4"))
    assert world.seen().state.nodes is None


def test_writes_use_the_newest_state(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(version=1))
    world.seen()
    world.change(a_job(version=2, workersStatus="1/2 ready"))
    (entry,) = world.seen().entries
    assert entry.job.metadata.resource_version == "2"


@pytest.mark.parametrize("taking_part", [False, True])
def test_deleted_jobs_leave_no_memory(world: World, taking_part: bool) -> None:
    if taking_part:
        world.change(a_queue(quota={"nodes": 4}))
    for number in range(50):
        job = a_job(f"run-{number}", 1, **(ADMITTED_STATUS if number % 2 else {}))
        world.change(charged(a_gang(f"run-{number}")))
        world.change(job)
        world.change(charged(a_pod(job=f"run-{number}")))
        if number % 3 == 0:
            world.seen()
        world.change(job, gone=True)
        world.change(a_gang(f"run-{number}"), gone=True)
        world.change(a_pod(job=f"run-{number}"), gone=True)
    kept = {
        name: value for name, value in vars(world.watch).items() if isinstance(value, dict | set)
    }
    assert {n for n, value in kept.items() if value} <= {"_admission_queues"}


def test_a_changed_label_of_a_pod_updates_both_jobs(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    for name in ("run", "other"):
        world.change(a_job(name, **ADMITTED_STATUS))
        world.change(a_gang(name))
    world.change(a_pod(job="run"))
    placed = {r.name: dict(r.pods_by_node) for r in world.seen().state.workloads}
    assert placed == {"run": {"n": 1}, "other": {}}
    pod = a_pod(job="run")
    labels = msgspec.structs.replace(pod.metadata.labels, torchrun_job="other")
    owners = a_pod(job="other").metadata.owner_references
    moved = msgspec.structs.replace(pod.metadata, labels=labels, owner_references=owners)
    world.change(msgspec.structs.replace(pod, metadata=moved))
    assert world.awake()
    placed = {r.name: dict(r.pods_by_node) for r in world.seen().state.workloads}
    assert placed == {"run": {}, "other": {"n": 1}}


def test_versions_of_what_is_cached(world: World) -> None:
    job, queue = a_job(version=3), a_queue()
    assert world.watch.version(job) is None
    world.change(job)
    world.change(queue)
    assert world.watch.version(a_job(version=1)) == "3"
    assert world.watch.version(queue) == ""
    other = msgspec.structs.replace(job.metadata, uid="another")
    assert world.watch.version(msgspec.structs.replace(job, metadata=other)) is None
