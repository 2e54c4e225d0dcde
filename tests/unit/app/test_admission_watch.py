"""What the coordinator sees, and which changes wake it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from torchrun_api.core import Job, Node, Pod
from torchrun_api.job import TorchrunJob
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.admission_watch import ADMISSION, COALESCE, AdmissionWatch, Seen
from torchrun_controller.clock import Clock
from torchrun_controller.metrics import Metrics
from torchrun_controller.reader import Answers, Reader
from torchrun_controller.workqueue import WorkQueue

NEVER_SENT: Any = None  # no informer runs here
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
THEN = "2026-01-02T03:04:00Z"


class World:
    def __init__(self, *, by_nodes: bool = True) -> None:
        self.time = 0.0
        metrics = Metrics(CollectorRegistry())
        keys: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        self.work: WorkQueue[str] = WorkQueue(lambda: self.time)
        still = Clock(monotonic=lambda: 0.0)
        answers = Answers(metrics.observe_request)
        self.reader = Reader(NEVER_SENT, answers, keys, metrics, clock=still)
        self.watch = AdmissionWatch(self.reader, self.work, by_nodes=by_nodes)
        self.reader.nodes.informer.synced.set()
        self.version = 0

    def change(self, obj: Any, *, gone: bool = False) -> None:
        """As the informer does: first the store, then the word of it."""
        self.version += 1
        for informer in self.reader.informers:
            if informer.kind.type is type(obj):
                if gone:
                    meta = obj.metadata
                    change = informer.store.delete(meta.namespace, meta.name, self.version)
                else:
                    change = informer.store.upsert(obj, self.version)
                assert change is not None
                informer._on_change(change, False)

    def awake(self) -> bool:
        """Whether the key is there after the moment in which changes are collected; takes it."""
        self.time += COALESCE
        key = self.work.get()
        if key is not None:
            assert key == ADMISSION
            self.work.done(key)
        return key is not None

    def seen(self, now: datetime = NOW) -> Seen:
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
    body = {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
        },
        "spec": {"jobQueue": "lab", "numNodes": 2, "command": "c"},
        "status": {"reason": "WaitingForAdmission", **status},
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


HELD = {"admission": {"nodes": 2, "time": THEN}, "phase": "Running", "reason": "WorkersRunning"}


def test_nothing_wakes_it_where_no_queue_takes_part(world: World) -> None:
    world.change(a_queue())
    world.change(a_job())
    world.change(a_gang())
    world.change(a_node())
    assert not world.awake()


def test_what_was_said_wakes_it_though_no_queue_takes_part_any_more(world: World) -> None:
    world.change(a_job(**HELD))
    assert world.awake()
    assert [entry.standing.request.admitted for entry in world.seen().entries] == [2]


class TestWaking:
    """By what matters to it, once for all that changes in the same moment."""

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

    def test_gangs_and_their_places(self, world: World) -> None:
        world.change(a_pod(phase="Running"))
        assert not world.awake()
        world.change(a_pod(phase="Succeeded"))
        assert world.awake()
        world.change(a_gang())
        assert world.awake()

    def test_queues_but_not_their_status(self, world: World) -> None:
        world.change(a_queue(quota={"nodes": 4}))
        assert not world.awake()
        world.change(a_queue(generation=2, quota={"nodes": 5}))
        assert world.awake()
        world.change(a_queue(generation=2), gone=True)
        assert not world.awake(), "and nobody else takes part"

    def test_nodes_but_not_their_heartbeats(self, world: World) -> None:
        world.change(a_node(cpu="4"))
        assert not world.awake()
        world.change(a_node(cpu="5"))
        assert world.awake()
        world.reader.nodes._tell(None)
        assert world.awake(), "nodes are known, or are known no more"


def test_the_state_follows_what_is_cached(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job())
    world.change(a_node(cpu="4"))
    state = world.seen().state
    assert [(r.name, r.nodes, r.admitted) for r in state.requests] == [("run", 2, 0)]
    assert [queue.name for queue in state.queues] == ["lab"]
    assert state.nodes is not None
    assert state.nodes[0].allocatable == {"cpu": 4000}
    world.change(a_job(version=2, **HELD))
    world.change(a_gang())
    world.change(a_pod(0))
    world.change(a_pod(1, node="other"))
    (request,) = world.seen().state.requests
    assert (request.admitted, request.placed) == (2, {"n": 1, "other": 1})
    world.change(a_job(version=2), gone=True)
    world.change(a_gang(), gone=True)
    world.change(a_pod(0), gone=True)
    world.change(a_pod(1), gone=True)
    assert world.seen().state.requests == ()


def test_pods_of_a_job_that_is_gone_are_charged_until_they_are_too(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(**HELD))
    world.change(a_gang())
    world.change(a_pod(0))
    world.change(a_job(**HELD), gone=True)
    world.change(a_gang(), gone=True)
    (request,) = world.seen().state.requests
    assert (request.name, request.admitted) == ("run", 2)
    world.change(a_job(version=9))  # another one of the same name waits
    assert len(world.seen().state.requests) == 2
    world.change(a_pod(0), gone=True)
    (request,) = world.seen().state.requests
    assert request.admitted == 0


def test_pods_on_lost_nodes_hold_nothing_up(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_node(ready="Unknown"))
    world.change(a_job(**{**HELD, "phase": "Failed"}))
    world.change(a_pod(0))
    seen = world.seen()
    assert seen.next_look == 35
    assert [r.admitted for r in seen.state.requests] == [2]
    later = world.seen(NOW + timedelta(seconds=36))
    assert later.state.requests == ()
    assert later.next_look is None


def test_nodes_are_waited_for_unless_they_may_not_be_read(world: World) -> None:
    world.reader.nodes.informer.synced.clear()
    assert world.watch.observe(NOW) is None
    world.reader.answers.observe("list", "nodes", 403, 0.1)
    assert world.seen().state.nodes is None


def test_nodes_may_be_of_no_account() -> None:
    world = World(by_nodes=False)
    world.change(a_node(cpu="4"))
    assert world.seen().state.nodes is None


def test_what_is_written_is_written_to_the_newest_state(world: World) -> None:
    world.change(a_queue(quota={"nodes": 4}))
    world.change(a_job(version=1))
    world.seen()
    world.change(a_job(version=2, workersStatus="1/2 ready"))
    (entry,) = world.seen().entries
    assert entry.job.metadata.resource_version == "2"


def test_versions_of_what_is_cached(world: World) -> None:
    job, queue = a_job(version=3), a_queue()
    assert world.watch.version(job) is None
    world.change(job)
    world.change(queue)
    assert world.watch.version(a_job(version=1)) == "3"
    assert world.watch.version(queue) == ""
    other = msgspec.structs.replace(job.metadata, uid="another")
    assert world.watch.version(msgspec.structs.replace(job, metadata=other)) is None
