"""Which changes wake which queues, and what is observed for a queue."""

from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from queue_world import a_job, kai_queue, make_trq
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import KAI_QUEUES
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.queue_view import QueueView
from torchrun_controller.clock import Clock
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.watch import Interrupted
from torchrun_controller.workqueue import WorkQueue
from world import START

NEVER_SENT: Any = None  # without running informers
KAI = Installed(resources=frozenset({(KAI_QUEUES.api_version, KAI_QUEUES.plural)}))


class World:
    def __init__(self, namespace: str = "") -> None:
        self.time = 0.0
        self.work: WorkQueue[tuple[str, str]] = WorkQueue(lambda: self.time)
        others: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        self.jitter = 0.0
        clock = Clock(jitter=lambda: self.jitter)
        self.factory = InformerFactory(NEVER_SENT, others, namespace, clock)
        self.watch = QueueView(NEVER_SENT, self.factory.observer, self.factory, self.work)

    def change(self, obj: Any, *, initial: bool = False) -> None:
        """Update the store, then call the handler, as the informer does."""
        for informer in (*self.factory.informers, self.watch._kai):
            if informer.kind.type is type(obj):
                informer._on_change(informer.store.upsert(obj, 1), initial)

    def remove(self, obj: Any) -> None:
        for informer in self.factory.informers:
            if informer.kind.type is type(obj):
                meta = obj.metadata
                change = informer.store.delete(meta.namespace, meta.name, 2)
                informer._on_change(change, False)

    def synced(self) -> None:
        self.watch._kai.synced.set()

    def install_kai(self) -> None:
        self.factory.discovery._update(KAI)

    def keys(self) -> list[str]:
        """Take the keys of the next seconds: a count comes after 1.5 s at the latest."""
        self.time += 2
        taken = list(iter(self.work.get, None))
        for key in taken:
            self.work.done(key)
        return sorted("/".join(key) for key in taken)


@pytest.fixture
def world() -> World:
    return World()


def test_a_queue_wakes_itself(world: World) -> None:
    world.change(make_trq())
    assert world.keys() == ["ml/gpu"]


@pytest.mark.parametrize(("jitter", "seconds"), [(0.0, 0.5), (0.5, 1.0), (0.99, 1.49)])
def test_queues_are_counted_at_random_times(world: World, jitter: float, seconds: float) -> None:
    world.jitter = jitter
    world.change(a_job("run"))
    assert world.work.next_ready() == pytest.approx(seconds)


def test_a_job_wakes_its_queue_when_its_phase_changes(world: World) -> None:
    world.change(a_job("run"))
    world.change(a_job("other"))
    assert world.work.get() is None, "changes are batched"
    assert world.keys() == ["ml/gpu"]
    running = a_job("run", "Running", gang=True)
    world.change(running)
    assert world.keys() == ["ml/gpu"]
    world.change(replace(running, status=replace(running.status, message="step 5")))
    assert world.keys() == [], "progress does not wake the queue"
    world.change(running, initial=True)
    assert world.keys() == ["ml/gpu"]
    world.remove(running)
    assert world.keys() == ["ml/gpu"]


def test_a_job_that_waits_for_admission_again_wakes_its_queue(world: World) -> None:
    """A deleted queue does not wait for it any more."""
    preempted = a_job("run", "Preempted", gang=True)
    assert preempted.status.workers is not None
    stopped = replace(preempted.status, workers=replace(preempted.status.workers, running=0))
    world.change(replace(preempted, status=stopped))
    world.keys()
    request = Condition(type="AdmissionRequested", status="True", reason="WaitingForAdmission")
    world.change(replace(preempted, status=replace(stopped, conditions=(request,))))
    assert world.keys() == ["ml/gpu"]


@pytest.mark.parametrize("initial", [False, True])
def test_a_job_that_moves_wakes_both_queues(world: World, initial: bool) -> None:
    job = a_job("run")
    world.change(job)
    world.keys()
    world.change(replace(job, spec=replace(job.spec, job_queue="other")), initial=initial)
    assert world.keys() == ["ml/gpu", "ml/other"]


def test_counts_of_a_queue_do_not_wake_its_jobs(world: World) -> None:
    heard: list[object] = []
    world.factory.subscribe(jobs=lambda *_: None, queues=lambda change, _: heard.append(change))
    queue = make_trq()
    world.change(a_job("run"))
    world.change(queue)
    jobs = world.factory._queue
    for key in iter(jobs.get, None):
        jobs.done(key)
    world.change(replace(queue, status=replace(queue.status, phase="Active")))
    assert jobs.get() is None
    world.change(replace(queue, metadata=replace(queue.metadata, deletion_timestamp=START)))
    assert jobs.get() == ("ml", "run")
    assert len(heard) == 3


def test_queues_of_one_kai_queue_wake_each_other(world: World) -> None:
    mine, other = make_trq(kaiQueue="a"), make_trq("other", kaiQueue="a")
    stranger = make_trq("stranger", kaiQueue="b")
    for queue in (mine, other, stranger):
        world.change(queue)
    world.keys()
    world.change(replace(mine, status=replace(mine.status, phase="Active")))
    assert world.keys() == ["ml/gpu"]
    world.change(make_trq(kaiQueue="b"))
    assert world.keys() == ["ml/gpu", "ml/other", "ml/stranger"]
    world.remove(stranger)
    assert world.keys() == ["ml/gpu", "ml/stranger"]


def test_the_owner_of_a_kai_queue_wakes_when_another_queue_names_it_no_longer(
    world: World,
) -> None:
    """It may remove the KAI queue then, although it names another one."""
    renamed, user = make_trq(kaiQueue="new"), make_trq("user", kaiQueue="former")
    for obj in (renamed, user, make_trq("stranger"), kai_queue("former", "ml/gpu")):
        world.change(obj)
    world.keys()
    deleted = replace(user, metadata=replace(user.metadata, deletion_timestamp=START))
    world.change(deleted)
    assert world.keys() == ["ml/gpu", "ml/user"]
    world.remove(deleted)
    assert world.keys() == ["ml/gpu", "ml/user"]


def test_kai_queues_wake_every_queue_but_their_status_does_not(world: World) -> None:
    world.change(make_trq())
    world.keys()
    world.change(kai_queue("training"))
    assert world.keys() == ["ml/gpu"]
    same = kai_queue("training")
    world.change(replace(same, metadata=replace(same.metadata, resource_version="7")))
    assert world.keys() == []
    world.install_kai()
    assert world.keys() == ["ml/gpu"]


def test_the_observed_state_of_a_queue(world: World) -> None:
    assert world.watch.observe("ml", "gpu") is None
    world.install_kai()
    queue, other = make_trq(kaiQueue="a"), make_trq("other", kaiQueue="a")
    going = make_trq("going", kaiQueue="a")
    gone = replace(going, metadata=replace(going.metadata, deletion_timestamp=START))
    without = make_trq("without")
    for obj in (queue, other, gone, without, a_job("run"), kai_queue("a")):
        world.change(obj)
    world.watch._kai.last_read.record("list", 403)
    unknown = world.watch.observe("ml", "gpu")
    assert unknown is not None
    assert unknown.kai is None
    assert "the verb list on queues.scheduling.run.ai" in unknown.kai_problem
    world.synced()
    observed = world.watch.observe("ml", "gpu")
    assert observed is not None
    assert observed.kai == {"a": kai_queue("a")}
    assert observed.kai_users == (other, gone)
    assert [job.metadata.name for job in observed.jobs] == ["run"]
    assert observed.installed == KAI


def test_the_caches_of_a_queue() -> None:
    world = World("ml")
    assert set(world.watch.stores(("ml", "gpu"))) == {"torchrunqueues.torchrun.ai"}
    world.synced()
    assert set(world.watch.stores(("ml", "gpu"))) == {
        "torchrunqueues.torchrun.ai",
        "queues.scheduling.run.ai",
    }


async def test_work_starts_when_kai_queues_are_listed_or_forbidden(world: World) -> None:
    await world.watch.wait_until_known()  # KAI is not installed
    world.install_kai()
    ready = anyio.Event()

    async def wait() -> None:
        await world.watch.wait_until_known()
        ready.set()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert not ready.is_set()
            await world.watch._kai.take([Interrupted("Forbidden", "no", 1.0, relist=True)])


async def test_a_refused_list_of_kai_queues_wakes_every_queue(world: World) -> None:
    world.change(make_trq())
    world.keys()
    world.watch._kai.last_read.record("list", 403)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.watch.follow)
        await anyio.lowlevel.checkpoint()
        assert world.keys() == ["ml/gpu"]
        tasks.cancel_scope.cancel()
