"""The state that the coordinator sees, and the changes that wake it."""

import anyio
import msgspec
import pytest
from msgspec.structs import replace

from torchrun_api.kinds.admission import QueueAdmission
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_api.kinds.resources import TORCHRUN_JOBS
from torchrun_controller.watch import Synced
from unit.cache.admission_caches import (
    ADMITTED_STATUS,
    NOW,
    World,
    a_gang,
    a_job,
    a_node,
    a_pod,
    a_queue,
    charged,
)


@pytest.fixture
def world() -> World:
    return World()


def reports_admission(queue: TorchrunQueue) -> TorchrunQueue:
    """The queue with an admission in its status."""
    return replace(queue, status=TorchrunQueueStatus(admission=QueueAdmission()))


def test_nothing_wakes_it_without_a_queue_with_admission(world: World) -> None:
    world.change(a_queue())
    world.change(a_job())
    world.change(a_gang())
    world.change(a_node())
    assert not world.awake()


def test_a_restart_wakes_it_for_an_admission_status_without_a_quota(world: World) -> None:
    world.change(reports_admission(a_queue()))
    assert world.awake()


def test_an_admitted_job_wakes_it_without_a_queue(world: World) -> None:
    world.change(a_job(**ADMITTED_STATUS))
    assert world.awake()
    assert [entry.classification.workload.admitted for entry in world.seen().entries] == [2]


async def test_no_decision_while_a_list_is_reported(world: World) -> None:
    """The cache confirms an admission whose job is not classified again yet."""
    world.change(a_queue(quota={"nodes": 2}))
    world.change(a_job())
    assert [entry.classification.workload.admitted for entry in world.seen().entries] == [0]
    (informer,) = (i for i in world.factory.informers if i.kind is TORCHRUN_JOBS)
    others = [a_job(f"other-{number}", phase="Succeeded") for number in range(1000)]
    observed: list[object] = []

    async def observe() -> None:
        while informer.is_reporting_list:
            version = world.watch.version(a_job())
            observed.append((version, world.watch.observe(NOW)))
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(informer.take, [Synced([*others, a_job(version=2, **ADMITTED_STATUS)], 9)])
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(observe)
    assert observed, "others run while a long list is reported"
    assert set(observed) == {("2", None)}
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

    def test_no_helper_pods_that_get_a_node(self, world: World) -> None:
        world.change(a_pod(7, node="", component="sync"))
        assert world.awake()
        world.change(a_pod(7, node="n", component="sync"))
        assert not world.awake()

    def test_queues_without_their_status(self, world: World) -> None:
        world.change(a_queue(quota={"nodes": 4}))
        assert not world.awake()
        world.change(a_queue(generation=2, quota={"nodes": 5}))
        assert world.awake()
        world.change(a_queue(generation=2), gone=True)
        assert not world.awake(), "no other queue has admission"

    def test_a_queue_until_its_admission_status_is_gone(self, world: World) -> None:
        without_quota = a_queue(generation=2)
        world.change(reports_admission(without_quota))
        assert world.awake()
        world.change(without_quota)
        assert not world.awake(), "the write of admission itself"
        world.change(a_node(cpu="5"))
        assert not world.awake(), "no queue is left that needs admission"

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


def test_admission_waits_for_nodes_unless_they_are_forbidden(world: World) -> None:
    world.factory.nodes.informer.synced = anyio.Event()
    assert world.watch.observe(NOW) is None
    world.factory.nodes.informer.last_read.record("list", 403)
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
    world.factory.nodes.informer.last_read.record("list", code)
    assert world.watch.observe(NOW) is None
    assert "admission waits for the list of machines" in world.factory.nodes.shortcoming()


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
