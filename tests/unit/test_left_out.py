"""The start of the controllers while one of their namespaces cannot be read."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from aiohttp import web

from scripted_server import ScriptedServer, connection, json_response, serving, streamed
from torchrun_controller.cache import catch_up
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.queue_view import QueueView
from torchrun_controller.client import Transport
from torchrun_controller.clock import Clock
from torchrun_controller.manager import Components, Manager
from torchrun_controller.workqueue import WorkQueue

JOB = {"metadata": {"name": "run", "namespace": "gone", "resourceVersion": "5"}}


class Api:
    """An API server with one job in the namespace `gone`, which only `permitted` clients read."""

    def __init__(self) -> None:
        self.permitted = False
        self.server: ScriptedServer

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        is_gone = "/namespaces/gone/" in request.path
        if is_gone and not self.permitted:
            return json_response({"kind": "Status", "message": "no role", "code": 403}, 403)
        if "watch" in request.query:
            response = await streamed(request)
            await self.server.hang()
            return response
        items = [JOB] if is_gone and request.path.endswith("/torchrunjobs") else []
        return json_response({"metadata": {"resourceVersion": "7"}, "items": items, "groups": []})


class Process:
    """The real informers and the real manager, with a lease and controllers of the test."""

    def __init__(self, transport: Transport) -> None:
        self.jobs: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        clock = Clock(jitter=lambda: 0.0)
        self.factory = InformerFactory(transport, self.jobs, ("team", "gone"), clock)
        queues: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        queue_view = QueueView(transport, self.factory.observer, self.factory, queues)
        self.elected, self.works, self.terminated = anyio.Event(), anyio.Event(), anyio.Event()
        leader = SimpleNamespace(
            elected=self.elected, run=anyio.sleep_forever, release=anyio.lowlevel.checkpoint
        )
        events = SimpleNamespace(run=anyio.lowlevel.checkpoint, shut_down=lambda seconds: None)
        worker = SimpleNamespace(name="job", concurrency=1, run=self._work, shut_down=lambda: None)
        components = Components(
            *cast("Any", (self.factory, queue_view, leader, events, {}, [worker]))
        )
        self.run = Manager(components, self.terminated.wait).run

    async def _work(self) -> None:
        self.works.set()
        await self.terminated.wait()


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api()
    async with serving(made.answer) as made.server:
        yield made


@asynccontextmanager
async def running(api: Api) -> AsyncIterator[Process]:
    with anyio.fail_after(60):
        async with connection(api.server.url).session("watch") as transport:
            process = Process(transport)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(process.run)
                yield process
                process.terminated.set()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REFUSED_CHECK", "RETRY"):
        monkeypatch.setattr(catch_up, name, 0.02)


@pytest.mark.parametrize("has_predecessor", [False, True])
async def test_a_namespace_that_is_deleted_does_not_stop_the_others(
    api: Api, has_predecessor: bool
) -> None:
    async with running(api) as process:
        if has_predecessor:
            await process.factory.scopes["team"].synced()
        process.elected.set()
        await process.works.wait()
        assert process.factory.scopes.left_out == {"gone"}


async def test_a_namespace_is_taken_in_once_it_can_be_read(api: Api) -> None:
    async with running(api) as process:
        process.elected.set()
        await process.works.wait()
        while process.jobs.get() is not None:
            pass
        taken_in = anyio.Event()
        process.factory.scopes.subscribe(lambda scope: taken_in.set())
        api.permitted = True
        await taken_in.wait()
        assert process.jobs.get() == ("gone", "run")
        assert process.factory.observe("gone", "run") is not None


async def test_a_new_leader_leaves_out_a_namespace_that_was_deleted_before(api: Api) -> None:
    api.permitted = True
    async with running(api) as process:
        for scope in process.factory.scopes.values():
            await scope.synced()
        api.permitted = False
        process.elected.set()
        await process.works.wait()
        assert process.factory.scopes.left_out == {"gone"}
        assert process.factory.observe("gone", "run") is None, "the cache may be old"
