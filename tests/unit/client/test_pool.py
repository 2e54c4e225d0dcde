"""Connections that are reused, and those that must not be."""

import asyncio
import base64
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from torchrun_controller.client.credentials import Endpoint, load_tls
from torchrun_controller.client.http1 import HttpError
from torchrun_controller.client.pool import IDLE_SECONDS, Pool
from unit.client.raw_server import OK, REQUEST, proxying, serving
from unit.client.tls_server import serving_tls

# Of a request that is answered.
PATIENCE = 60

Run = Callable[[Coroutine[Any, Any, None]], None]

# The controller runs on uvloop where it exists, and its transports differ.
on_each_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@on_each_loop
class TestReuse:
    def test_one_connection_for_one_request_after_the_other(self, run: Run) -> None:
        async def check() -> None:
            async with serving(OK, OK, OK) as server:
                pool = Pool()
                for _ in range(3):
                    response = await pool.exchange(server.endpoint, REQUEST, PATIENCE)
                    assert (response.status, response.body) == (200, b"{}")
                assert server.connections == 3  # each time another endpoint
                pool.close()

        run(check())

    def test_the_same_endpoint_shares_a_connection(self, run: Run) -> None:
        async def check() -> None:
            async with serving(OK, OK, OK) as server:
                pool, endpoint = Pool(), server.endpoint
                for _ in range(3):
                    await pool.exchange(endpoint, REQUEST, PATIENCE)
                assert server.connections == 1
                assert server.requests == [REQUEST] * 3
                pool.close()
                await server.ended.get()

        run(check())

    def test_requests_at_the_same_time_have_their_own(self, run: Run) -> None:
        async def check() -> None:
            async with serving(OK) as server:
                pool, endpoint = Pool(), server.endpoint
                await asyncio.gather(
                    *(pool.exchange(endpoint, REQUEST, PATIENCE) for _ in range(4))
                )
                assert server.connections == 4
                pool.close()

        run(check())

    def test_not_after_a_long_pause(self, run: Run) -> None:
        async def check() -> None:
            now = 0.0
            async with serving(OK, OK) as server:
                pool, endpoint = Pool(clock=lambda: now), server.endpoint
                await pool.exchange(endpoint, REQUEST, PATIENCE)
                now += IDLE_SECONDS - 1
                await pool.exchange(endpoint, REQUEST, PATIENCE)
                assert server.connections == 1
                now += IDLE_SECONDS
                await pool.exchange(endpoint, REQUEST, PATIENCE)
                assert server.connections == 2
                await server.ended.get()  # the old one is closed
                pool.close()

        run(check())

    @pytest.mark.parametrize(
        "reply",
        [
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
            b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        ],
        ids=["close", "1.0"],
    )
    def test_not_if_the_server_says_so(self, run: Run, reply: bytes) -> None:
        async def check() -> None:
            async with serving(reply, OK) as server:
                pool, endpoint = Pool(), server.endpoint
                for _ in range(2):
                    await pool.exchange(endpoint, REQUEST, PATIENCE)
                    await server.ended.get()
                assert server.connections == 2

        run(check())

    def test_not_after_the_server_closed_it(self, run: Run) -> None:
        async def check() -> None:
            async with serving(OK, linger=False) as server:
                pool, endpoint = Pool(), server.endpoint
                for _ in range(3):
                    await pool.exchange(endpoint, REQUEST, PATIENCE)
                    (idle,) = pool._idle
                    while idle.is_open:  # noqa: ASYNC110 the connection has no event for its end
                        await asyncio.sleep(0)
                assert server.connections == 3

        run(check())

    def test_not_after_bytes_that_nobody_asked_for(self, run: Run) -> None:
        async def check() -> None:
            async with serving(OK + b"HTTP/1.1 408 Request Timeout\r\n", OK) as server:
                pool, endpoint = Pool(), server.endpoint
                with pytest.raises(HttpError, match="more than one response"):
                    await pool.exchange(endpoint, REQUEST, PATIENCE)
                await server.ended.get()
                assert not pool._idle

        run(check())

    def test_not_after_a_request_that_was_cancelled(self, run: Run) -> None:
        async def check() -> None:
            async with serving(b"", OK) as server:
                pool, endpoint = Pool(), server.endpoint
                request = asyncio.ensure_future(pool.exchange(endpoint, REQUEST, PATIENCE))
                await server.arrivals.get()
                request.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await request
                await server.ended.get()
                assert not pool._idle

        run(check())

    def test_not_after_a_timeout(self, run: Run) -> None:
        async def check() -> None:
            async with serving(OK, b"HTTP/1.1 200 OK\r\n") as server:
                pool, endpoint = Pool(), server.endpoint
                # On a busy machine, a connection may take longer than the short timeout.
                await pool.exchange(endpoint, REQUEST, PATIENCE)
                with pytest.raises(TimeoutError):
                    await pool.exchange(endpoint, REQUEST, 0.05)
                await server.ended.get()
                assert not pool._idle

        run(check())

    def test_a_request_that_ends_after_close_closes_its_connection(self, run: Run) -> None:
        async def check() -> None:
            async with serving(OK) as server:
                pool = Pool()
                request = asyncio.ensure_future(pool.exchange(server.endpoint, REQUEST, PATIENCE))
                await asyncio.sleep(0)
                pool.close()
                assert (await request).status == 200
                await server.ended.get()

        run(check())


@on_each_loop
def test_a_body_without_a_length_ends_with_the_connection(run: Run) -> None:
    async def check() -> None:
        async with serving(b"HTTP/1.1 200 OK\r\n\r\n{}", linger=False) as server:
            response = await Pool().exchange(server.endpoint, REQUEST, PATIENCE)
            assert (response.body, response.keep_alive) == (b"{}", False)

    run(check())


@on_each_loop
def test_the_gate_is_asked_once_just_before_the_bytes(run: Run) -> None:
    async def check() -> None:
        ports: list[int] = []
        async with serving(OK, OK) as server:

            def gate() -> None:
                ports.append(len(server.requests))
                if len(ports) == 2:
                    raise PermissionError

            pool, endpoint = Pool(before_send=gate), server.endpoint
            await pool.exchange(endpoint, REQUEST, PATIENCE)
            with pytest.raises(PermissionError):
                await pool.exchange(endpoint, REQUEST, PATIENCE)
            await server.ended.get()
            assert (ports, len(server.requests)) == ([0, 1], 1)

    run(check())


@on_each_loop
class TestProxy:
    def test_a_tunnel_to_a_server_with_tls(self, run: Run, pki: Path) -> None:
        async def check() -> None:
            async with serving(OK, OK, tls=serving_tls(pki)) as server, proxying() as proxy:
                endpoint = Endpoint(
                    f"https://127.0.0.1:{server.port}",
                    tls=load_tls(str(pki / "ca.crt")),
                    server_hostname="kubernetes.test",
                    proxy=f"http://me:s%40crt@127.0.0.1:{proxy.port}",
                )
                pool = Pool(tcp_user_timeout=2.0)
                for _ in range(2):
                    assert (await pool.exchange(endpoint, REQUEST, PATIENCE)).body == b"{}"
                pool.close()
                secret = base64.b64encode(b"me:s@crt").decode()
                assert proxy.requests == [
                    f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
                    f"Proxy-Authorization: Basic {secret}\r\n\r\n".encode()
                ]
                assert server.connections == 1

        run(check())

    def test_the_certificate_is_verified(self, run: Run, pki: Path) -> None:
        async def check() -> None:
            async with serving(OK, tls=serving_tls(pki)) as server, proxying() as proxy:
                endpoint = Endpoint(
                    f"https://127.0.0.1:{server.port}",
                    tls=load_tls(str(pki / "ca.crt")),
                    server_hostname="other.test",
                    proxy=f"http://127.0.0.1:{proxy.port}",
                )
                with pytest.raises(ssl.SSLCertVerificationError):
                    await Pool().exchange(endpoint, REQUEST, PATIENCE)
                assert server.requests == []

        run(check())

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "answered 407 to CONNECT"),
            (b"", "did not answer CONNECT"),
            (b"SSH-2.0\r\n\r\n", "did not answer CONNECT with HTTP"),
        ],
        ids=["407", "nothing", "not http"],
    )
    def test_a_proxy_that_refuses(self, run: Run, answer: bytes, message: str) -> None:
        async def check() -> None:
            async with proxying(answer) as proxy:
                endpoint = Endpoint("http://127.0.0.1:1", proxy=f"http://127.0.0.1:{proxy.port}")
                with pytest.raises(HttpError, match=message):
                    await Pool().exchange(endpoint, REQUEST, PATIENCE)

        run(check())

    def test_only_http_proxies(self, run: Run) -> None:
        async def check() -> None:
            endpoint = Endpoint("http://127.0.0.1:1", proxy="socks5://p.test")
            with pytest.raises(HttpError, match=r"socks5://p\.test is not an http:// proxy"):
                await Pool().exchange(endpoint, REQUEST, PATIENCE)

        run(check())
