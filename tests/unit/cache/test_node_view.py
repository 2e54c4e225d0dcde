"""Which changes of a node wake which jobs, and what is logged without access to nodes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog
from aiohttp import web

from frames import page
from informing import PATIENCE, Play, Step, gives, refuses, running
from scripted_server import connection, serving
from torchrun_api.kinds.core import Node, Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_controller.cache import node_view
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.node_view import NodeView
from torchrun_controller.cache.store import Change
from torchrun_controller.clock import Clock
from torchrun_controller.watch import Interrupted
from torchrun_controller.workqueue import WorkQueue
from unit.cache.test_informer_factory import World, readiness

LABELS = {
    "torchrun-job-name": "run",
    "app.kubernetes.io/component": "worker",
}
BOUND: dict[str, Any] = {
    "metadata": {"name": "run-0-abcde", "namespace": "team", "labels": LABELS},
    "spec": {"nodeName": "node-1"},
}


def a_node(name: str = "node-1", ready: str = "True", *taints: str, version: str = "1") -> Node:
    body = {
        "metadata": {"name": name, "resourceVersion": version},
        "spec": {"taints": [{"key": key} for key in taints]},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }
    return msgspec.convert(body, Node)


@pytest.fixture
def world() -> World:
    new_world = World()
    new_world.change(msgspec.convert(BOUND, Pod))
    new_world.keys()
    return new_world


def change(world: World, old: Node | None, new: Node | None, *, initial: bool = False) -> None:
    world.factory.nodes._handle_change(Change(old, new), initial)


def synced(world: World) -> None:
    world.factory.nodes.informer.synced.set()


@asynccontextmanager
async def listing(first_list: Step) -> AsyncIterator[NodeView]:
    """Nodes whose informer runs, on an API server with this answer to the first list."""
    play = Play(first_list)
    async with serving(play) as server, connection(server.url).session("watch") as transport:
        play.server = server
        work: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        nodes = InformerFactory(transport, work, "", Clock()).nodes
        async with running(nodes.informer):
            yield nodes


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, a_node()),
        (a_node(), None),
        (a_node(), a_node(ready="Unknown")),
        (a_node(ready="Unknown"), a_node()),
        (a_node(), a_node("node-1", "True", "node.kubernetes.io/out-of-service")),
    ],
    ids=["comes", "goes", "lost", "back", "tainted"],
)
def test_node_changes_that_matter_wake_the_job(world, old, new):
    change(world, old, new)
    assert world.keys() == [("team", "run")]


def test_a_job_with_an_unfenced_worker_on_the_node_is_woken(world):
    body = {
        "metadata": {"name": "waits", "namespace": "team"},
        "status": {"unfenced": [{"attempt": 0, "index": 1, "node": "node-2"}]},
    }
    world.change(msgspec.convert(body, TorchrunJob))
    world.keys()
    change(world, a_node("node-2"), None)
    assert world.keys() == [("team", "waits")]


@pytest.mark.parametrize(
    "new", [a_node(version="2"), a_node("node-1", "True", "mine")], ids=["heartbeat", "taint"]
)
def test_other_node_changes_wake_no_job(world, new):
    change(world, a_node(), new)
    assert world.keys() == []


def test_a_node_without_workers_wakes_no_job(world):
    change(world, a_node("node-2"), None)
    assert world.keys() == []


def test_a_node_that_has_just_come_has_no_conditions(world):
    change(world, a_node(), msgspec.convert({"metadata": {"name": "node-1"}}, Node))
    assert world.keys() == [("team", "run")]


def test_nodes_are_known_once_listed_until_their_watch_is_silent(world):
    watch = world.factory.nodes
    assert watch.view is None
    waits = "lost machines are not detected, and admission waits for the list of machines"
    assert watch.shortcoming() == f"{waits}: no response yet"
    world.factory.nodes.informer.last_read.record("list", 500)
    assert watch.shortcoming() == f"{waits}: cannot list nodes: HTTP 500 (HTTP 500)"
    world.factory.nodes.informer.last_read.record("watch", 403)
    assert "grant the controller's role the verb watch on nodes" in watch.shortcoming()
    synced(world)
    assert watch.view is watch.informer.store
    assert watch.shortcoming() == ""
    watch.informer.last_seen -= 1000
    assert watch.view is None


def test_jobs_await_nodes_that_the_controller_may_read(world):
    world.change(msgspec.convert({"metadata": {"name": "run", "namespace": "team"}}, TorchrunJob))

    def is_awaited() -> bool:
        observed = world.factory.observe("team", "run")
        assert observed is not None
        assert observed.cluster.nodes is None or not observed.cluster.nodes_awaited
        return observed.cluster.nodes_awaited

    assert is_awaited()
    world.factory.nodes.informer.last_read.record("list", 403)
    assert not is_awaited()
    synced(world)
    assert not is_awaited()


def test_readiness_does_not_wait_for_nodes(world):
    for informer in world.factory.informers:
        if informer is not world.factory.nodes.informer:
            informer.synced.set()
    assert readiness(world) == ""


@pytest.mark.parametrize(
    ("answer", "is_listed"),
    [(gives(page([], 9)), True), (refuses(403, "Forbidden"), False)],
    ids=["listed", "refused"],
)
async def test_the_first_list_is_waited_for(monkeypatch, answer, is_listed):
    monkeypatch.setattr(node_view, "_FIRST_LIST_SECONDS", 10 * PATIENCE)

    async def first_list(request: web.BaseRequest) -> web.StreamResponse:
        assert not waiting.done()
        return await answer(request)

    async with listing(first_list) as nodes, asyncio.timeout(PATIENCE):
        waiting = asyncio.ensure_future(nodes.wait_until_known())
        await waiting
        assert (nodes.view is not None) is is_listed


async def test_a_late_list_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(node_view, "_FIRST_LIST_SECONDS", 0.0)

    async def first_list(request: web.BaseRequest) -> web.StreamResponse:
        await late.wait()
        return await gives(page([], 9))(request)

    late = asyncio.Event()
    async with listing(first_list) as nodes, asyncio.timeout(PATIENCE):
        await nodes.wait_until_known()
        assert nodes.view is None
        late.set()
        await nodes.informer.synced.wait()


async def test_forbidden_nodes_are_logged(world):
    with structlog.testing.capture_logs() as lines:
        task = asyncio.create_task(world.factory.nodes.follow())
        await asyncio.sleep(0)
        task.cancel()
        assert lines == [], "the first list is still running"
        world.factory.nodes.informer.last_read.record("list", 403)
        await world.factory.nodes.informer.take([Interrupted("Forbidden", "no", 1.0, relist=True)])
        task = asyncio.create_task(world.factory.nodes.follow())
        await asyncio.sleep(0)
        task.cancel()
    (line,) = (line for line in lines if line["event"] == "machines are not readable")
    assert line["log_level"] == "warning"
    assert "grant the controller's role" in line["why"]


async def test_every_job_with_workers_is_woken_when_nodes_are_known(world):
    task = asyncio.create_task(world.factory.nodes.follow())
    await asyncio.sleep(0)
    assert world.keys() == []
    synced(world)
    task.cancel()
    task = asyncio.create_task(world.factory.nodes.follow())
    await asyncio.sleep(0)
    task.cancel()
    assert world.keys() == [("team", "run")]
