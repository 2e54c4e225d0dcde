"""Lists and watches through the REST client of kubernetes_asyncio."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from scripted_server import OK, ScriptedServer, Token, connection, json_response, serving, streamed
from scripted_server import serving_bytes as broken
from torchrun_controller.client import ApiError, Connection, Disconnected
from torchrun_controller.client.credentials import Endpoint, load_tls
from unit.client.tls_server import Write, make_pki, serving_tls


async def empty(request: web.BaseRequest) -> web.Response:
    return json_response({"items": []})


class TestList:
    async def test_carries_query_and_headers(self) -> None:
        async def echo(request: web.BaseRequest) -> web.Response:
            return json_response({"query": dict(request.query), "headers": dict(request.headers)})

        query = {"labelSelector": "a=b,c in (d,e)", "continue": "x+/=&y", "limit": "500"}
        async with serving(echo) as server, connection(server.url).session("watch") as transport:
            as_metadata = {"Accept": "application/json;as=PartialObjectMetadataList"}
            page = await transport.read_list("/api/v1/pods", query=query, headers=as_metadata)
        echoed = json.loads(page.body)
        assert echoed["query"] == query
        assert echoed["headers"]["Accept"] == as_metadata["Accept"]
        assert echoed["headers"]["Accept-Encoding"] == "identity"
        assert echoed["headers"]["Authorization"] == "Bearer one"
        assert echoed["headers"]["User-Agent"] == "torchrun-controller/watch"

    async def test_an_expired_page(self) -> None:
        async def refuse(request: web.BaseRequest) -> web.Response:
            return json_response({"kind": "Status", "reason": "Expired", "message": "old"}, 410)

        async with serving(refuse) as server, connection(server.url).session("watch") as transport:
            with pytest.raises(ApiError, match="410 Expired: old"):
                await transport.read_list("/api/v1/pods")

    async def test_a_page_that_breaks_off(self) -> None:
        reply = OK + b'Content-Length: 100\r\n\r\n{"items"'
        async with broken(reply) as url, connection(url).session("watch") as transport:
            with pytest.raises(Disconnected, match="GET /api/v1/pods: "):
                await transport.read_list("/api/v1/pods")

    async def test_a_server_that_never_responds(self) -> None:
        async def hang(request: web.BaseRequest) -> web.Response:
            await server.hang()
            return await empty(request)

        async with serving(hang) as server, connection(server.url).session("watch") as transport:
            with pytest.raises(Disconnected, match="timed out"):
                await transport.read_list("/api/v1/pods", timeout=0.05)

    async def test_a_connection_is_used_again(self) -> None:
        peers: set[object] = set()

        async def answer(request: web.BaseRequest) -> web.Response:
            assert request.transport is not None
            peers.add(request.transport.get_extra_info("peername"))
            return await empty(request)

        async with serving(answer) as server, connection(server.url).session("watch") as transport:
            for _ in range(3):
                await transport.read_list("/api/v1/pods")
        assert len(peers) == 1


class TestTls:
    async def test_a_new_ca_counts_for_new_watches_and_open_ones_stay(
        self, pki: Path, tmp_path: Path
    ) -> None:
        goes_on = asyncio.Event()

        async def watch(request: web.BaseRequest) -> web.StreamResponse:
            response = await streamed(request, b"one\n")
            await goes_on.wait()
            await response.write(b"two\n")
            return response

        other = make_pki(tmp_path)
        async with (
            serving(watch, serving_tls(pki)) as old,
            serving(empty, serving_tls(other)) as new,
        ):
            reached = Connection(Endpoint(old.url, load_tls(str(pki / "ca.crt"))), Token())
            async with reached.session("watch") as transport:
                async with transport.stream("/x", query={}, total=60) as chunks:
                    assert await anext(chunks) == b"one\n"
                    former = transport._rest._current
                    reached.endpoint = Endpoint(old.url, load_tls(str(other / "ca.crt")))
                    with pytest.raises(Disconnected, match="certificate verify failed"):
                        await transport.read_list("/x")
                    goes_on.set()
                    assert await anext(chunks) == b"two\n"
                assert former is not None
                assert former.rest.pool_manager.closed
            reached.endpoint = Endpoint(new.url, load_tls(str(other / "ca.crt")))
            async with reached.session("watch") as transport:
                assert (await transport.read_list("/x")).body == b'{"items": []}'

    async def test_a_missing_certificate_is_no_crash(self, pki: Path, tmp_path: Path) -> None:
        tls = load_tls(str(pki / "ca.crt"), str(pki / "client.crt"), str(pki / "client.key"))
        gone = Endpoint("https://127.0.0.1:1", type(tls)(tls.context, tls.ca_file, "/nowhere"))
        async with Connection(gone, Token()).session("watch") as transport:
            with pytest.raises(Disconnected, match="FileNotFoundError"):
                await transport.read_list("/x")

    @pytest.mark.parametrize(("name", "is_known"), [("kubernetes.test", True), ("other", False)])
    async def test_the_tls_server_name(
        self, name: str, is_known: bool, kubeconfig: Write, server: ScriptedServer
    ) -> None:
        path = kubeconfig({"token": "t"}, cluster={"tls-server-name": name})
        async with (await Connection.load(path)).session("watch") as transport:
            if is_known:
                assert json.loads((await transport.read_list("/x")).body)
            else:
                with pytest.raises(Disconnected, match="Hostname mismatch"):
                    await transport.read_list("/x")


class TestProxy:
    async def test_of_the_endpoint(self) -> None:
        endpoint = Endpoint("http://127.0.0.1:1", proxy="http://127.0.0.1:2")
        async with Connection(endpoint, Token()).session("watch") as transport:
            with pytest.raises(Disconnected, match=r"127\.0\.0\.1:2"):
                await transport.read_list("/x")

    async def test_the_environment_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The endpoint has decided it, with the networks of NO_PROXY."""
        for name in ("no_proxy", "NO_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:2")
        async with serving(empty) as server, connection(server.url).session("watch") as transport:
            assert (await transport.read_list("/x")).status == 200
