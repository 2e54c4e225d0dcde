"""Which kinds of groups are watched, and which job a change wakes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from scripted_server import ScriptedServer, connection, json_response, serving, streamed
from torchrun_api.kinds.core import Job, SchedulingGroup
from torchrun_api.kinds.resources import Kind
from torchrun_controller.cache.group_view import GroupView, select_kinds
from torchrun_controller.cache.informer import Unobserved
from torchrun_controller.cache.store import Change
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.kai import KAI_POD_GROUPS
from torchrun_controller.reconcile.schedulers.kueue import KUEUE_WORKLOADS
from torchrun_controller.reconcile.schedulers.native import NATIVE_GROUPS
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO_POD_GROUPS
from unit.cache.test_informer_factory import World


def installed(*found: Kind[Any]) -> Installed:
    return Installed(resources=frozenset((kind.api_version, kind.plural) for kind in found))


def a_group(name: str, owner: str, job: str = "", kind: str = "TorchrunJob") -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": "7",
            "labels": {"torchrun-job-name": job} if job else {},
            "ownerReferences": [
                {"kind": "Other", "name": "else", "uid": "else"},
                {"kind": kind, "name": owner, "uid": f"uid-{owner}", "controller": True},
            ],
        }
    }


def test_the_newest_version_of_each_scheduler_is_watched():
    installed_kinds = (KAI_POD_GROUPS, *NATIVE_GROUPS, KUEUE_WORKLOADS[1])
    assert select_kinds(installed(*installed_kinds)) == (
        KAI_POD_GROUPS,
        NATIVE_GROUPS[0],
        KUEUE_WORKLOADS[1],
    )
    assert select_kinds(Installed()) == ()


class Api:
    """An API server with a list of one group."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.listed = asyncio.Event()
        self.server: ScriptedServer

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.paths.append(f"{request.path}?{request.query.get('labelSelector', '')}")
        group = a_group("run", "run", "run")
        if "watch" not in request.query:
            return json_response({"metadata": {"resourceVersion": "7"}, "items": [group]})
        response = await streamed(request)
        self.listed.set()
        await self.server.hang()
        return response


@pytest.fixture
async def api() -> AsyncIterator[tuple[Api, str]]:
    made = Api()
    async with serving(made.answer) as made.server:
        yield made, made.server.url


async def test_the_silence_of_a_kind_is_known_while_it_is_served():
    groups = World("team").factory.groups
    resource = VOLCANO_POD_GROUPS.resource
    groups.follow(installed(VOLCANO_POD_GROUPS))
    groups.adjust(lambda watch: None)
    assert groups.silence(resource) == 0, "before the first list"
    (informer,) = groups.informers
    informer.synced.set()
    informer.last_seen -= 1000
    assert groups.silence(resource) >= 1000
    assert groups.silence(KAI_POD_GROUPS.resource) == 0
    groups.follow(Installed())
    groups.adjust(lambda watch: None)
    assert groups.silence(resource) == 0


async def test_kinds_are_watched_as_long_as_they_are_served(api):
    made, url = api
    changes: asyncio.Queue[Change[SchedulingGroup]] = asyncio.Queue()
    async with connection(url).session("test") as transport, asyncio.TaskGroup() as tasks:
        watch = GroupView(
            transport,
            Unobserved(),
            lambda kind, change, initial: changes.put_nowait(change),
            "team",
        )
        task = tasks.create_task(watch.run())
        watch.follow(installed(VOLCANO_POD_GROUPS))
        change = await changes.get()
        assert change.object.metadata.name == "run"
        assert [g.object.metadata.uid for g in watch.owned_by("uid-run")] == ["uid-run"]
        assert watch.owned_by("uid-run")[0].kind == VOLCANO_POD_GROUPS
        assert not watch.owned_by("else")
        await made.listed.wait()
        made.listed.clear()
        watch.follow(installed(KUEUE_WORKLOADS[0]))
        await changes.get()
        await made.listed.wait()
        assert watch.owned_by("uid-run")[0].kind == KUEUE_WORKLOADS[0]
        assert len(watch._watches) == 1
        task.cancel()
    volcano = "/apis/scheduling.volcano.sh/v1beta1/namespaces/team/podgroups?torchrun-job-name"
    kueue = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/workloads?"
    assert made.paths == [volcano, volcano, kueue, kueue]  # a list and a watch each


def change(world: World, group: dict[str, Any], *, initial: bool = False) -> list[Any]:
    obj = msgspec.convert(group, SchedulingGroup)
    world.factory._handle_change(KUEUE_WORKLOADS[0], Change(None, obj), initial)
    return world.keys()


def test_a_group_of_ours_wakes_its_job():
    assert change(World(), a_group("run-r1", "run", "run")) == [("team", "run")]
    assert change(World(), a_group("run-r1", "run", "run"), initial=True) == [("team", "run")]


def test_a_workload_wakes_the_job_of_its_child_job():
    world = World()
    meta = {"name": "run-r1", "namespace": "team", "labels": {"torchrun-job-name": "run"}}
    world.change(msgspec.convert({"metadata": meta}, Job))
    world.keys()
    assert change(world, a_group("job-run-r1-1a2b3", "run-r1", kind="Job")) == [("team", "run")]
    assert change(world, a_group("job-other-1a2b3", "other", kind="Job")) == []


def test_a_changed_label_of_a_group_wakes_both_jobs():
    world = World()
    old, new = (msgspec.convert(a_group("g", "g", j), SchedulingGroup) for j in ("run", "next"))
    world.factory._handle_change(VOLCANO_POD_GROUPS, Change(old, new), False)
    assert sorted(world.keys()) == [("team", "next"), ("team", "run")]
