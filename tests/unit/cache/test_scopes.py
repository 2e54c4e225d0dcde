"""Namespaces that cannot be read: what is reported, and what is observed until they can."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from scripted_server import connection, json_response, serving
from torchrun_controller.cache.admission_view import ADMISSION, COALESCE, AdmissionView
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.queue_view import QueueView
from torchrun_controller.clock import Clock
from torchrun_controller.serving.checks import caches_synced
from torchrun_controller.workqueue import WorkQueue
from unit.cache.admission_caches import (
    NEVER_SENT,
    NOW,
    a_gang,
    a_job,
    a_queue,
    charged,
)

NAMESPACES = ("team", "gone")


class World:
    """The views of a controller for two namespaces."""

    def __init__(self) -> None:
        self.time = 0.0
        clock = Clock(monotonic=lambda: 0.0, jitter=lambda: 0.0)
        self.jobs: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        self.queues: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        self.decisions: WorkQueue[str] = WorkQueue(lambda: self.time)
        self.factory = InformerFactory(NEVER_SENT, self.jobs, NAMESPACES, clock)
        self.queue_view = QueueView(NEVER_SENT, self.factory.observer, self.factory, self.queues)
        self.admission = AdmissionView(
            self.factory,
            self.decisions,
            by_nodes=False,
            cohort_namespaces=frozenset(NAMESPACES),
        )

    def add(self, *objects: Any) -> None:
        for obj in objects:
            for informer in self.factory.scopes[obj.metadata.namespace].informers.values():
                if informer.kind.type is type(obj):
                    informer._on_change(informer.store.upsert(obj, 1), True)

    def sync(self, namespace: str) -> None:
        for informer in self.factory.scopes[namespace].informers.values():
            informer.synced.set()

    def refuse(self, namespace: str, code: int = 403) -> None:
        for informer in self.factory.scopes[namespace].informers.values():
            informer.last_read.record("list", code)

    def readiness(self) -> str:
        return caches_synced(self.factory.scopes.unsynced)()

    def taken(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
        """Take all keys of jobs, of queues, and of admission."""
        self.time += COALESCE
        found = []
        for work in (self.jobs, self.queues, self.decisions):
            keys = list(iter(work.get, None))
            for key in keys:
                work.done(key)
            found.append(sorted(keys))
        return tuple(found)


@pytest.fixture
def world() -> World:
    return World()


def moved(obj: Any, namespace: str = "gone") -> Any:
    """The same object in another namespace."""
    return replace(obj, metadata=replace(obj.metadata, namespace=namespace))


@pytest.mark.parametrize("code", [403, 404])
def test_a_namespace_that_cannot_be_read_does_not_stop_the_others(world: World, code: int) -> None:
    world.refuse("gone", code)
    assert "pods in namespace gone (cannot list pods" in world.readiness()
    assert "pods in namespace team (waiting for the first list)" in world.readiness()
    assert world.factory.scopes.shortcoming() == "", "the server may have just started"
    world.sync("team")
    assert world.readiness() == ""
    assert "nothing is reconciled in namespace gone: cannot" in world.factory.scopes.shortcoming()
    world.sync("gone")
    assert world.factory.scopes.shortcoming() == ""


@pytest.mark.parametrize("code", [0, 429, 500])
def test_a_namespace_that_cannot_be_read_for_a_while_is_awaited(world: World, code: int) -> None:
    world.sync("team")
    world.refuse("gone", code)
    assert "pods in namespace gone" in world.readiness()
    assert world.factory.scopes.shortcoming() == ""


def test_nothing_is_observed_of_a_namespace_that_is_left_out(world: World) -> None:
    world.add(a_job(), moved(a_job()), a_queue(), moved(a_queue()))
    world.factory.scopes.leave_out({"gone"})
    assert world.factory.observe("team", "run") is not None
    assert world.factory.observe("gone", "run") is None
    assert world.queue_view.observe("gone", "lab") is None
    observed = world.queue_view.observe("team", "lab")
    assert observed is not None
    assert observed.namespaces == ("team",), "a KAI queue may belong to a queue that is not known"
    assert "gone" in world.factory.scopes.shortcoming()
    world.factory.scopes.take_in("gone")
    assert world.factory.observe("gone", "run") is not None
    assert world.queue_view.observe("gone", "lab") is not None
    assert world.factory.scopes.shortcoming() == ""


def test_the_jobs_and_queues_of_a_namespace_that_is_taken_in_are_added(world: World) -> None:
    world.add(a_job(), moved(a_job("other")), moved(a_queue(quota={"nodes": 4})))
    world.factory.scopes.leave_out({"gone"})
    world.taken()
    world.factory.scopes.take_in("gone")
    assert world.taken() == ([("gone", "other")], [("gone", "lab")], [ADMISSION])
    world.factory.scopes.take_in("gone")
    assert world.taken() == ([], [], []), "it was taken in already"


def test_admission_ignores_a_namespace_that_is_left_out(world: World) -> None:
    """Its jobs may be known in part, such as without the pods that they still have."""
    quota = {"nodes": 4}
    world.add(a_queue(quota=quota), a_job(), moved(a_queue(quota=quota)), moved(a_job()))
    world.add(moved(charged(a_gang("earlier"))))
    world.factory.scopes.leave_out({"gone"})
    seen = world.admission.observe(NOW)
    assert seen is not None
    assert {queue.metadata.namespace for queue in seen.queues} == {"team"}
    assert {entry.job.metadata.namespace for entry in seen.entries} == {"team"}
    assert [queue.namespace for queue in seen.state.queues] == ["team"]
    assert [workload.namespace for workload in seen.state.workloads] == ["team"]
    world.factory.scopes.take_in("gone")
    seen = world.admission.observe(NOW)
    assert seen is not None
    assert {queue.namespace for queue in seen.state.queues} == {"team", "gone"}
    workloads = sorted((workload.namespace, workload.name) for workload in seen.state.workloads)
    assert workloads == [("gone", "earlier"), ("gone", "run"), ("team", "run")]


def test_a_cohort_is_paused_while_a_namespace_that_shares_it_is_left_out(world: World) -> None:
    """The jobs there may use quota that the queues of the other namespaces lend."""
    world.add(
        a_queue("shares", cohort="research", quota={"nodes": 4}),
        a_queue("alone", quota={"nodes": 4}),
    )

    def pauses() -> dict[str, str]:
        seen = world.admission.observe(NOW)
        assert seen is not None
        return {queue.name: queue.paused_reason for queue in seen.state.queues}

    assert pauses() == {"shares": "", "alone": ""}
    world.factory.scopes.leave_out({"gone"})
    pause = "Namespace gone may share the cohort and cannot be read."
    assert pauses() == {"shares": pause, "alone": ""}
    world.factory.scopes.take_in("gone")
    assert pauses() == {"shares": "", "alone": ""}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """An API server that lists nothing in `team`, and permits nothing in `gone`."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if "/namespaces/gone/" in request.path:
            return json_response({"kind": "Status", "message": "no role", "code": 403}, 403)
        return json_response({"metadata": {"resourceVersion": "7"}, "items": []})

    async with serving(answer) as server:
        yield server.url


async def test_a_success_in_one_namespace_hides_no_failure_in_another(url: str) -> None:
    async with connection(url).session("test") as transport:
        factory = InformerFactory(transport, WorkQueue(lambda: 0.0), NAMESPACES)
        for namespace in ("gone", "team"):
            for informer in factory.scopes[namespace].informers.values():
                await informer._fetch(informer._watcher.next(0.0))
    refused = {name: scope.is_refused for name, scope in factory.scopes.items()}
    assert refused == {"team": False, "gone": True}
