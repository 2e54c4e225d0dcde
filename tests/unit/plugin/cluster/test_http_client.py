"""Requests over TCP to the API server in memory."""

import io

import pytest
from aiohttp import web

from kubectl_torchrun.cluster import client
from kubectl_torchrun.cluster.backoff import Retries
from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.http_client import HttpClient
from kubectl_torchrun.cluster.slices import JOBS

from ..api_server import ApiServer


@pytest.mark.parametrize("name", ["a b", "a?b=c", "a#b", "ü", "a%20b"])
async def test_a_name_is_quoted_in_the_path(server: ApiServer, name: str) -> None:
    async with HttpClient(server.url) as http:
        with pytest.raises(RequestError, match=r"torchrunjobs .* not found"):
            await Api(http, "ns", Retries()).get(JOBS, name)


async def test_a_query_is_quoted(server: ApiServer) -> None:
    paths: list[str] = []
    server.hooks.append(lambda request: paths.append(request.query["labelSelector"]))
    async with HttpClient(server.url) as http:
        await http.request("GET", JOBS.path("ns"), query={"labelSelector": "a=b,c in (d, e)"})
    assert paths == ["a=b,c in (d, e)"]


async def test_the_response_of_a_pod_is_limited(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod with the labels of the controller may be that of any tenant, and send without end."""
    monkeypatch.setattr(client, "_POD_BYTES", 1000)
    server.hooks.append(lambda _: web.Response(body=io.BytesIO(b"x" * (4 << 20))))
    async with HttpClient(server.url) as http:
        assert len((await http.request("GET", "/")).content) == 4 << 20
        status, body = await Api(http, "ns", Retries()).ask_pod("p", "GET", "/readyz")
        assert (status, body) == (200, b"x" * 1000)


async def test_a_closed_port_is_unreachable() -> None:
    async with HttpClient("http://127.0.0.1:1") as http:
        with pytest.raises(Unreachable, match="Cannot connect to the API server"):
            await Api(http, "ns", Retries()).read("/api")
