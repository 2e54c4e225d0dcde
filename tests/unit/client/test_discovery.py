"""Discovery of installed kinds, and invalid responses."""

import json
from collections.abc import AsyncIterator
from typing import cast

import pytest
from aiohttp import web

from garbled import GARBLED
from scripted_server import ScriptedServer, connection, json_response, serving
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.resources import PODS, Kind
from torchrun_api.names import OWN_CATEGORY
from torchrun_controller.client import ConfigError, Response, Transport
from torchrun_controller.client.discovery import Discovery
from torchrun_controller.reconcile.model.observed import Installed

VOLCANO = ("scheduling.volcano.sh/v1beta1", "podgroups")


def document(*groups: tuple[str, str, str]) -> JsonObject:
    """An APIGroupDiscoveryList of groups with one version and one resource each."""
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "items": [
            {
                "metadata": {"name": group},
                "versions": [
                    {"version": version, "resources": [{"resource": resource, "verbs": ["get"]}]}
                ],
            }
            for group, version, resource in groups
        ],
    }


class Api:
    """Returns the response that a test sets."""

    def __init__(self) -> None:
        self.body: JsonObject = document()
        self.status = 200
        self.topologies: list[str] = []
        self.topologies_status = 200
        self.requests: list[tuple[str, str]] = []
        self.server: ScriptedServer

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/apis/kai.scheduler/v1alpha1/topologies":
            items: list[JsonValue] = [{"metadata": {"name": name}} for name in self.topologies]
            return json_response({"items": items}, self.topologies_status)
        tag = request.headers.get("If-None-Match", "")
        self.requests.append((request.headers["Accept"], tag))
        etag = f'"{hash(str(self.body))}"'
        if self.status == 200 and tag == etag:
            return web.Response(status=304)
        return json_response(self.body, self.status, {"ETag": etag})


class Garbage:
    """A transport that returns garbage only."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def request(self, method: str, path: str, **options: object) -> Response:
        return Response(200, self.body)


@pytest.mark.parametrize("body", GARBLED)
async def test_garbage_is_logged_and_retried(body: bytes) -> None:
    discovery = Discovery(cast("Transport", Garbage(body)))
    await discovery.poll()
    assert discovery.installed is None
    assert discovery.first_poll.is_set()
    assert "is unknown: cannot discover the APIs" in discovery.shortcoming()


OURS = ("torchrun.ai", "v1alpha1", "torchrunjobs")


@pytest.mark.parametrize(
    ("kind", "categories", "refused"),
    [
        (OURS, ["all"], True),
        (OURS, [], True),
        (OURS, ["all", OWN_CATEGORY], False),
        (("torchrun.ai", "v1alpha1", "torchrunqueues"), ["all"], True),
        (("torchrun.ai", "v1", "torchrunjobs"), ["all"], False),
        (("other.ai", "v1alpha1", "torchrunjobs"), [], False),
    ],
)
async def test_crds_of_another_controller_are_refused(
    kind: tuple[str, str, str], categories: list[str], refused: bool
) -> None:
    body = document(kind)
    resource = body["items"][0]["versions"][0]["resources"][0]  # type: ignore[index,call-overload]
    resource["categories"] = categories  # type: ignore[index,call-overload]
    discovery = Discovery(cast("Transport", Garbage(json.dumps(body).encode())))
    if refused:
        with pytest.raises(ConfigError, match=r"not those of this controller.*kubectl apply"):
            await discovery.poll()
        assert discovery.installed is None
    else:
        await discovery.poll()
        assert discovery.installed == Installed()


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    new_api = Api()
    async with serving(new_api.answer) as new_api.server:
        yield new_api


@pytest.fixture
async def discovery(api: Api) -> AsyncIterator[Discovery]:
    async with connection(api.server.url).session("test") as transport:
        yield Discovery(transport)


async def test_only_kinds_of_schedulers_are_found(api, discovery):
    api.body = document(
        ("scheduling.volcano.sh", "v1beta1", "podgroups"), ("example.com", "v1", "podgroups")
    )
    await discovery.poll()
    assert discovery.installed == Installed(resources=frozenset({VOLCANO}))
    podgroups = Kind("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup", PODS.type)
    assert discovery.installed.serves(podgroups)
    assert not discovery.installed.serves(PODS)
    assert not discovery.shortcoming()
    assert "as=APIGroupDiscoveryList" in api.requests[0][0]


async def test_each_change_is_reported_once(api, discovery):
    changes: list[Installed] = []
    discovery.subscribe(changes.append)
    await discovery.poll()
    await discovery.poll()
    api.body = document(("scheduling.volcano.sh", "v1beta1", "podgroups"))
    await discovery.poll()
    api.body = document(
        ("scheduling.volcano.sh", "v1beta1", "podgroups"), ("example.com", "v1", "things")
    )
    await discovery.poll()
    api.body = document()
    await discovery.poll()
    assert changes == [Installed(), Installed(resources=frozenset({VOLCANO})), Installed()]


async def test_an_unchanged_list_is_not_sent_again(api, discovery):
    await discovery.poll()
    await discovery.poll()
    assert api.requests[0][1] == ""
    assert api.requests[1][1]
    assert discovery.installed == Installed()
    assert not discovery.shortcoming()


@pytest.mark.parametrize("status", [403, 503])
async def test_a_refusal_keeps_the_last_result_and_is_logged(api, discovery, status):
    assert "is unknown: no response yet" in discovery.shortcoming()
    api.status = status
    await discovery.poll()
    assert discovery.installed is None
    assert discovery.first_poll.is_set()
    assert "is unknown: cannot discover the APIs" in discovery.shortcoming()
    api.status, api.body = 200, document(("scheduling.volcano.sh", "v1beta1", "podgroups"))
    await discovery.poll()
    api.status = status
    await discovery.poll()
    assert discovery.installed == Installed(resources=frozenset({VOLCANO}))
    assert "may be outdated" in discovery.shortcoming()


async def test_a_server_without_discovery_is_logged(api, discovery):
    api.body = {"kind": "APIGroupList", "groups": []}
    await discovery.poll()
    assert discovery.installed is None
    assert "needs Kubernetes 1.26 or newer" in discovery.shortcoming()
    api.body = {"items": "nothing"}
    await discovery.poll()
    assert "cannot discover the APIs" in discovery.shortcoming()


async def test_an_unreachable_server_ends_nothing():
    async with connection("http://127.0.0.1:1").session("test") as transport:
        discovery = Discovery(transport)
        await discovery.poll()
        assert "is unknown: cannot discover the APIs" in discovery.shortcoming()
        assert discovery.first_poll.is_set()


async def test_discovery_is_repeated(api, discovery):
    class EnoughError(Exception):
        pass

    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise EnoughError

    discovery._sleep = sleep
    with pytest.raises(EnoughError):
        await discovery.run()
    assert len(api.requests) == 3


async def test_topologies_of_kai_are_read_each_time(api, discovery):
    api.body = document(("kai.scheduler", "v1alpha1", "topologies"))
    await discovery.poll()
    assert discovery.installed.topologies == ()
    api.topologies = ["racks", "blocks"]
    await discovery.poll()
    assert discovery.installed.topologies == ("blocks", "racks")
    assert len(api.requests) == 2


@pytest.mark.parametrize("status", [403, 404])
async def test_forbidden_topologies_count_as_none(api, discovery, status):
    api.body = document(("kai.scheduler", "v1alpha1", "topologies"))
    api.topologies_status = status
    await discovery.poll()
    assert discovery.installed.topologies == ()
    assert not discovery.shortcoming()


async def test_a_failed_read_of_topologies_changes_nothing(api, discovery):
    api.body, api.topologies = document(("kai.scheduler", "v1alpha1", "topologies")), ["racks"]
    await discovery.poll()
    api.topologies_status = 503
    await discovery.poll()
    assert discovery.installed.topologies == ("racks",)
    assert "cannot discover the APIs" in discovery.shortcoming()
