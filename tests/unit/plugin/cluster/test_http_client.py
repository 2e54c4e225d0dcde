"""Requests over TCP to the API server in memory."""

import pytest

from kubectl_torchrun.cluster.backoff import Backoff
from kubectl_torchrun.cluster.client import Api, Unreachable
from kubectl_torchrun.cluster.http_client import HttpClient
from kubectl_torchrun.cluster.slices import JOBS

from ..api_server import ApiServer
from ..laptop import Laptop


@pytest.mark.parametrize("name", ["a b", "a?b=c", "a#b", "ü", "a%20b"])
def test_a_name_is_quoted_in_the_path(laptop: Laptop, name: str) -> None:
    result = laptop.run("status", name, "--no-watch")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "not found" in result.stderr


async def test_a_query_is_quoted(server: ApiServer) -> None:
    paths: list[str] = []
    server.hooks.append(lambda request: paths.append(request.query["labelSelector"]))
    async with HttpClient(server.url) as client:
        await client.request("GET", JOBS.path("ns"), query={"labelSelector": "a=b,c in (d, e)"})
    assert paths == ["a=b,c in (d, e)"]


async def test_a_closed_port_is_unreachable() -> None:
    async with HttpClient("http://127.0.0.1:1") as client:
        with pytest.raises(Unreachable, match="Cannot connect to the API server"):
            await Api(client, "ns", Backoff()).read("/api")
