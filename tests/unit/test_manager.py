"""The order in which components start and stop."""

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import structlog

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ObjectMeta
from torchrun_controller import manager
from torchrun_controller.cache import catch_up
from torchrun_controller.cache.store import Store
from torchrun_controller.client import Disconnected
from torchrun_controller.leader import NotLeader
from torchrun_controller.manager import Components, Manager
from torchrun_controller.workqueue import AsyncWorkQueue


class Memory:
    """An informer of jobs or queues. `behind`: its cache lags. `failures`: reads that fail first."""

    kind = SimpleNamespace(resource="torchrunjobs.torchrun.ai")

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.failures = 0
        self.reached, self.late = anyio.Event(), anyio.Event()
        self.reached.set()

    async def newest(self) -> int:
        if self.failures:
            self.failures -= 1
            raise Disconnected("no answer")
        self.log.append("looked")
        return 7

    async def wait_for(self, version: int, seconds: float) -> bool:
        assert version == 7
        with anyio.move_on_after(seconds):
            await self.reached.wait()
            return True
        self.late.set()
        return False


class Process:
    """Components that log their calls and wait for events of the test."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.elected, self.terminated, self.lost = anyio.Event(), anyio.Event(), anyio.Event()
        self.reconciled, self.written = anyio.Event(), anyio.Event()
        self.reconciled.set()
        self.written.set()
        self.ends, self.working = anyio.Event(), anyio.Event()
        self.nodes_known = anyio.Event()
        self.nodes_known.set()
        self.memory = Memory(self.log)
        self.jobs: Store[TorchrunJob] = Store()
        self.queues: dict[str, AsyncWorkQueue[tuple[str, str]]] = {}

    async def run(self) -> None:
        first_poll = anyio.Event()
        first_poll.set()
        factory = SimpleNamespace(
            informers=[],
            synced=anyio.lowlevel.checkpoint,
            status_informers=[self.memory],
            caches=SimpleNamespace(jobs=self.jobs),
            nodes=SimpleNamespace(
                follow=anyio.sleep_forever, wait_until_known=self.nodes_known.wait
            ),
            discovery=SimpleNamespace(run=anyio.sleep_forever, first_poll=first_poll),
            groups=SimpleNamespace(run=anyio.sleep_forever),
        )
        watch = SimpleNamespace(
            run_kai=anyio.sleep_forever,
            follow=anyio.sleep_forever,
            wait_until_known=anyio.lowlevel.checkpoint,
        )
        leader = SimpleNamespace(elected=self.elected, run=self._lead, release=self._release)
        events = SimpleNamespace(run=self._report, shut_down=lambda seconds: self.ends.set())
        worker = SimpleNamespace(name="job", concurrency=1, run=self._work, shut_down=self._shut)
        components = Components(
            *cast("Any", (factory, watch, leader, events, self.queues, [worker]))
        )
        await Manager(components, self.terminated.wait).run()

    def _shut(self) -> None:
        self.log.append("no more keys")

    async def _lead(self) -> None:
        await self.lost.wait()
        raise NotLeader("lost")

    async def _release(self) -> None:
        self.log.append("released")

    async def _work(self) -> None:
        self.log.append("works")
        self.working.set()
        await self.terminated.wait()
        await self.reconciled.wait()
        self.log.append("reconciled")

    async def _report(self) -> None:
        await self.ends.wait()
        await self.written.wait()
        self.log.append("last event")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    for name in ("DRAIN_SECONDS", "FLUSH_SECONDS"):
        monkeypatch.setattr(manager, name, 60.0)
    for name in ("RETRY", "WARNING"):
        monkeypatch.setattr(catch_up, name, 0.02)
    return Process()


async def settled() -> None:
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def test_the_lease_is_released_after_the_last_write(process: Process) -> None:
    process.elected.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.run)
        await settled()
        process.terminated.set()
    assert process.log == ["works", "no more keys", "reconciled", "last event", "released"]


@pytest.mark.parametrize("stuck", ["reconciled", "written"])
async def test_a_write_without_an_answer_leaves_the_lease_to_expire(
    process: Process, stuck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DRAIN_SECONDS", "FLUSH_SECONDS"):
        monkeypatch.setattr(manager, name, 0.02)
    process.elected.set()
    setattr(process, stuck, anyio.Event())
    with structlog.testing.capture_logs() as lines:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.run)
            await settled()
            process.terminated.set()
    assert "released" not in process.log
    assert lines[-1]["event"].startswith("lease left to expire")


async def test_a_standby_ends_at_once(process: Process) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.run)
        await settled()
        process.terminated.set()
    assert process.log == ["no more keys", "last event", "released"]


async def test_a_lost_lease_ends_the_process_without_a_release(process: Process) -> None:
    process.elected.set()
    process.reconciled = anyio.Event()
    process.lost.set()
    with pytest.raises(NotLeader):
        await process.run()
    assert "released" not in process.log


async def test_a_new_leader_waits_for_its_caches(process: Process) -> None:
    process.memory.reached = anyio.Event()
    process.memory.failures = 2
    with structlog.testing.capture_logs() as lines:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.run)
            await settled()
            process.elected.set()
            await process.memory.late.wait()
            assert process.log == ["looked"], "reports start after the election and the caches"
            process.memory.reached.set()
            await process.working.wait()
            process.terminated.set()
    assert [line["event"] for line in lines[:2]] == [
        "cannot determine whether a cache is current",
        "waiting for a stale cache",
    ], "the same failure twice is one line"


async def test_the_controllers_wait_for_nodes(process: Process) -> None:
    process.nodes_known = anyio.Event()
    process.elected.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.run)
        await settled()
        assert process.log == [], "the placement of a gang needs the nodes"
        process.nodes_known.set()
        await process.working.wait()
        process.terminated.set()


async def test_the_only_replica_does_not_wait_for_its_caches(process: Process) -> None:
    process.elected.set()
    process.terminated.set()
    await process.run()
    assert "looked" not in process.log


async def test_a_standby_drops_the_keys_of_deleted_objects(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "DROP_SECONDS", 0.01)
    jobs: Store[TorchrunJob] = Store()
    jobs.upsert(TorchrunJob(metadata=ObjectMeta(name="here", namespace="team")), 1)
    process.jobs = jobs
    queue: AsyncWorkQueue[tuple[str, str]] = AsyncWorkQueue(lambda: 0.0)
    process.queues["job"] = queue
    for name in ("gone", "here"):
        queue.add(("team", name))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.run)
        with anyio.fail_after(60):
            while len(queue) > 1:  # noqa: ASYNC110 the queue has no such event
                await anyio.sleep(0.005)
        process.terminated.set()
    assert queue.get() == ("team", "here")
