"""Which changes of a node wake which jobs, and what is logged without access to nodes."""

import asyncio
from typing import Any

import msgspec
import pytest
import structlog

from torchrun_api.core import Node, Pod
from torchrun_api.job import TorchrunJob
from torchrun_controller.cache import node_view
from torchrun_controller.cache.store import Change
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
    waits = "lost nodes are not detected, and admission by nodes waits"
    assert watch.shortcoming() == f"{waits}: no response yet"
    world.answers.observe("list", "nodes", 500, 0.1)
    assert watch.shortcoming() == f"{waits}: cannot list nodes: HTTP 500 (HTTP 500)"
    world.answers.observe("watch", "nodes", 403, 0.1)
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
    world.answers.observe("list", "nodes", 403, 0.1)
    assert not is_awaited()
    synced(world)
    assert not is_awaited()


def test_readiness_does_not_wait_for_nodes(world):
    for informer in world.factory.informers:
        if informer is not world.factory.nodes.informer:
            informer.synced.set()
    assert world.factory.is_synced
    assert readiness(world) == ""


@pytest.mark.parametrize("result", ["listed", "refused", "late"])
async def test_the_first_list_is_waited_for(world, monkeypatch, result):
    monkeypatch.setattr(node_view, "_FIRST_LIST_SECONDS", 0.01 if result == "late" else 60.0)
    waiting = asyncio.ensure_future(world.factory.nodes.wait_until_known())
    done, _ = await asyncio.wait([waiting], timeout=0)
    assert not done
    if result == "listed":
        synced(world)
    if result == "refused":
        world.factory.read_errors.observe("list", "nodes", 403, 0.1)
    await waiting


async def test_forbidden_nodes_are_logged(world):
    with structlog.testing.capture_logs() as lines:
        task = asyncio.create_task(world.factory.nodes.follow())
        await asyncio.sleep(0)
        task.cancel()
        assert lines == [], "the first list is still running"
        world.answers.observe("list", "nodes", 403, 0.1)
        task = asyncio.create_task(world.factory.nodes.follow())
        await asyncio.sleep(0)
        task.cancel()
    (line,) = lines
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
