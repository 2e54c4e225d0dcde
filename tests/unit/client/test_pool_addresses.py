"""Names with several addresses, of which some do not answer."""

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ports import refusing_port
from torchrun_controller.client.credentials import Endpoint, load_tls
from torchrun_controller.client.pool import Pool
from unit.client.raw_server import OK, REQUEST, proxying, serving
from unit.client.tls_server import serving_tls

# CONNECT_SECONDS limits the connection: one that is off fails by itself.
SECONDS = 60.0

LOOPS = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.Loop}


class Runner:
    """Runs a coroutine on a loop that resolves several.test to `ports` of 127.0.0.1."""

    def __init__(self, kind: str) -> None:
        self.ports: list[int] = []
        runner = self

        class Loop(LOOPS[kind]):  # type: ignore[misc]
            async def getaddrinfo(self, host: str, port: int, **options: Any) -> Any:
                if host != "several.test":
                    return await super().getaddrinfo(host, port, **options)
                stream = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
                return [(*stream, ("127.0.0.1", known)) for known in runner.ports]

        self._loop = Loop

    def run(self, check: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=self._loop) as runner:
            runner.run(check)


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


@contextmanager
def silent() -> Iterator[int]:
    """A port that answers no SYN, as a machine that is off: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


class TestServer:
    @pytest.mark.parametrize("number", [1, 2])
    def test_those_that_are_off_delay_a_request_only(self, runner: Runner, number: int) -> None:
        async def check() -> None:
            with silent() as off:
                async with serving(OK) as server:
                    runner.ports = [off] * number + [server.port]
                    pool = Pool(tcp_user_timeout=2.0)
                    endpoint = Endpoint("http://several.test:1")
                    assert (await pool.exchange(endpoint, REQUEST, SECONDS)).body == b"{}"
                    (idle,) = pool._idle
                    sock = idle._transport.get_extra_info("socket")
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                    pool.close()
                    await server.ended.get()
                    assert server.connections == 1

        runner.run(check())

    def test_one_that_refuses(self, runner: Runner) -> None:
        async def check() -> None:
            with refusing_port() as closed:
                async with serving(OK) as server:
                    runner.ports = [closed, server.port]
                    endpoint = Endpoint("http://several.test:1")
                    assert (await Pool().exchange(endpoint, REQUEST, SECONDS)).body == b"{}"

        runner.run(check())

    def test_all_refuse(self, runner: Runner) -> None:
        async def check() -> None:
            with refusing_port() as one, refusing_port() as other:
                runner.ports = [one, other]
                with pytest.raises(OSError, match=r"refused|Connect call failed"):
                    await Pool().exchange(Endpoint("http://several.test:1"), REQUEST, SECONDS)

        runner.run(check())

    def test_the_certificate_is_that_of_the_name(self, runner: Runner, pki: Path) -> None:
        async def check() -> None:
            with silent() as off:
                async with serving(OK, tls=serving_tls(pki)) as server:
                    runner.ports = [off, server.port]
                    endpoint = Endpoint(
                        "https://several.test:1",
                        tls=load_tls(str(pki / "ca.crt")),
                        server_hostname="kubernetes.test",
                    )
                    assert (await Pool().exchange(endpoint, REQUEST, SECONDS)).body == b"{}"

        runner.run(check())


class TestProxy:
    def test_one_that_is_off_delays_a_request_only(self, runner: Runner) -> None:
        async def check() -> None:
            with silent() as off:
                async with serving(OK) as server, proxying() as proxy:
                    runner.ports = [off, proxy.port]
                    endpoint = Endpoint(server.endpoint.server, proxy="http://several.test:1")
                    assert (await Pool().exchange(endpoint, REQUEST, SECONDS)).body == b"{}"
                    assert len(proxy.requests) == 1

        runner.run(check())

    def test_all_refuse(self, runner: Runner) -> None:
        async def check() -> None:
            endpoint = Endpoint("http://127.0.0.1:1", proxy="http://several.test:1")
            message = r"cannot connect to the proxy several\.test:1 \("
            with refusing_port() as one, refusing_port() as other:
                runner.ports = [one, other]
                with pytest.raises(OSError, match=message):
                    await Pool().exchange(endpoint, REQUEST, SECONDS)

        runner.run(check())


def test_a_cancelled_connection_closes_its_socket_once(runner: Runner) -> None:
    """Older versions of uvloop close the descriptor below a socket object that closes it again."""

    async def check() -> None:
        loop = asyncio.get_running_loop()
        async with serving(OK) as server:
            for turns in (1, 2):
                sock = socket.socket()
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", server.port))
                task = asyncio.ensure_future(loop.create_connection(asyncio.Protocol, sock=sock))
                for _ in range(turns):
                    await asyncio.sleep(0)
                assert task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.sleep(0)
                assert sock.fileno() == -1

    runner.run(check())
