"""A client certificate that is renewed while connections with the old one are open."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from scripted_server import ScriptedServer, json_response, serving
from torchrun_controller.client import ApiError, Connection
from torchrun_controller.client import connection as transport_connection
from torchrun_controller.client.session import Transport
from unit.client.tls_server import Write, plugin, serving_tls, who

# Provides the certificate of this name to the connection.
Provide = Callable[[str], None]


class ApiServer:
    """Refuses the certificates in `expired`, also on open connections, as kube-apiserver does."""

    def __init__(self) -> None:
        self.expired: set[str] = set()
        self.codes: list[int] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:
        response = await who(request)
        assert isinstance(response.text, str)
        is_valid = json.loads(response.text)["certificate"] not in self.expired
        self.codes.append(200 if is_valid else 401)
        return response if is_valid else json_response({}, status=401)


@pytest.fixture
def api_server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def server(pki: Path, api_server: ApiServer) -> AsyncIterator[ScriptedServer]:
    async with serving(api_server.answer, serving_tls(pki)) as running:
        yield running


@pytest.fixture(params=["files", "plugin"])
def provide(request: pytest.FixtureRequest, pki: Path, tmp_path: Path) -> Provide:
    def files(name: str) -> None:
        for end in ("crt", "key"):
            (tmp_path / f"c.{end}").write_bytes((pki / f"{name}.{end}").read_bytes())

    def by_plugin(name: str) -> None:
        certificate, key = ((pki / f"{name}.{end}").read_text() for end in ("crt", "key"))
        plugin(tmp_path, clientCertificateData=certificate, clientKeyData=key)

    provide = {"files": files, "plugin": by_plugin}[request.param]
    provide("client")
    return provide


@pytest.fixture
def path(provide: Provide, kubeconfig: Write, tmp_path: Path) -> str:
    if (tmp_path / "plugin").exists():
        version = "client.authentication.k8s.io/v1"
        return kubeconfig({"exec": {"apiVersion": version, "command": str(tmp_path / "plugin")}})
    files = {"certificate": "crt", "key": "key"}
    return kubeconfig({f"client-{name}": str(tmp_path / f"c.{end}") for name, end in files.items()})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def open_connections(path: str, clock: Clock) -> AsyncIterator[Transport]:
    """A session with three idle connections."""
    first = await Connection.load(path)
    aged = Connection(first.endpoint, first._credentials, clock=clock)
    await aged.authorization()
    async with aged.refreshing(), aged.session("write") as transport:
        await asyncio.gather(*(transport.request("GET", "/who") for _ in range(3)))
        assert len(transport._pool._idle) == 3
        yield transport


async def certificate(transport: Transport) -> str:
    body = (await transport.request("GET", "/who")).body
    name: str = json.loads(body)["certificate"]
    return name


async def test_a_refused_request_is_repeated_with_the_new_one(
    api_server: ApiServer, provide: Provide, path: str
) -> None:
    async with open_connections(path, Clock()) as transport:
        provide("renewed")
        api_server.expired.add("client")
        assert [await certificate(transport) for _ in range(4)] == ["renewed"] * 4
        assert api_server.codes == [200, 200, 200, 401, 200, 200, 200, 200]


async def test_refused_at_the_same_time(api_server: ApiServer, provide: Provide, path: str) -> None:
    async with open_connections(path, Clock()) as transport:
        provide("renewed")
        api_server.expired.add("client")
        names = await asyncio.gather(*(certificate(transport) for _ in range(3)))
        assert names == ["renewed"] * 3


async def test_a_refused_watch_is_repeated_with_the_new_one(
    api_server: ApiServer, provide: Provide, path: str
) -> None:
    async with open_connections(path, Clock()) as transport:
        provide("renewed")
        api_server.expired.add("client")
        async with transport.stream("/who", query={}, total=30) as chunks:
            body = b"".join([chunk async for chunk in chunks])
        assert json.loads(body)["certificate"] == "renewed"


async def test_one_that_is_replaced_in_time_is_never_refused(
    api_server: ApiServer, provide: Provide, path: str
) -> None:
    clock = Clock()
    async with open_connections(path, clock) as transport:
        provide("renewed")
        clock.now += 60
        # A plugin may be slower than a request waits for it.
        async with asyncio.timeout(120):
            while await certificate(transport) != "renewed":  # noqa: ASYNC110
                await asyncio.sleep(0)
        api_server.expired.add("client")
        assert [await certificate(transport) for _ in range(3)] == ["renewed"] * 3
        assert 401 not in api_server.codes


async def test_without_a_new_one_a_refusal_is_final(api_server: ApiServer, path: str) -> None:
    async with open_connections(path, Clock()) as transport:
        api_server.expired.add("client")
        with pytest.raises(ApiError, match="401 Unauthorized"):
            await transport.request("GET", "/who")
        assert api_server.codes == [200, 200, 200, 401]


# A plugin returns both at once.
@pytest.mark.parametrize("provide", ["files"], indirect=True)
async def test_a_new_one_without_its_key_keeps_the_old_one(
    api_server: ApiServer, path: str, pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A request that does not wait for the files has the old one.
    monkeypatch.setattr(transport_connection, "REREAD_TIMEOUT", 60.0)
    clock = Clock()
    async with open_connections(path, clock) as transport:
        (tmp_path / "c.crt").write_bytes((pki / "renewed.crt").read_bytes())
        clock.now += 60
        transport._pool.close()  # so that each request has a new connection
        assert [await certificate(transport) for _ in range(2)] == ["client"] * 2
        (tmp_path / "c.key").write_bytes((pki / "renewed.key").read_bytes())
        clock.now += 60
        assert [await certificate(transport) for _ in range(2)] == ["renewed"] * 2
