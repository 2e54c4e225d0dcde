"""Requests and streams with the faults of servers, proxies and networks."""

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
from aiohttp import web

from scripted_server import (
    OK,
    Token,
    connection,
    json_response,
    serving,
    serving_bytes,
)
from torchrun_controller.client import ApiError, Disconnected
from torchrun_controller.client.session import resource_of


async def ok(request: web.BaseRequest) -> web.Response:
    return json_response({"path": str(request.rel_url)})


class TestRequest:
    async def test_carries_method_path_query_body_and_headers(self) -> None:
        async def echo(request: web.BaseRequest) -> web.Response:
            return json_response(
                {
                    "method": request.method,
                    "path": request.path,
                    "query": dict(request.query),
                    "body": await request.text(),
                    "headers": dict(request.headers),
                }
            )

        query = {"labelSelector": "a=b,c in (d,e)", "continue": "x+/=&y", "fieldManager": "me"}
        async with serving(echo) as server, connection(server.url).session("write") as transport:
            response = await transport.request(
                "PATCH",
                "/api/v1/namespaces/a/pods/b:8080/proxy/v1",
                query=query,
                body=b"{}",
                content_type="application/apply-patch+yaml",
            )
        echoed = json.loads(response.body)
        assert response.status == 200
        assert echoed["method"] == "PATCH"
        assert echoed["path"] == "/api/v1/namespaces/a/pods/b:8080/proxy/v1"
        assert echoed["query"] == query
        assert echoed["body"] == "{}"
        assert echoed["headers"]["Content-Type"] == "application/apply-patch+yaml"
        assert echoed["headers"]["Authorization"] == "Bearer one"
        assert echoed["headers"]["Accept-Encoding"] == "identity"
        assert echoed["headers"]["User-Agent"] == "torchrun-controller/write"

    async def test_the_identity_is_in_the_user_agent(self) -> None:
        async def echo(request: web.BaseRequest) -> web.Response:
            return json_response({"agent": request.headers["User-Agent"]})

        async with (
            serving(echo) as server,
            connection(server.url).session("write", identity="pod_1") as transport,
        ):
            response = await transport.request("GET", "/version")
        assert json.loads(response.body) == {"agent": "torchrun-controller/write (pod_1)"}

    async def test_leadership_is_checked_after_the_connect(self) -> None:
        class ClosedError(Exception):
            pass

        closed = False

        def gate() -> None:
            if closed:
                raise ClosedError

        async def slow() -> str:
            nonlocal closed
            closed = True  # during the read of the credentials
            return "Bearer late"

        async with serving(ok) as server:
            connection_of_server = connection(server.url)
            async with connection_of_server.session("write", before_send=gate) as transport:
                await transport.request("PATCH", "/version", body=b"{}")
                connection_of_server.authorization = lambda refused=None: slow()  # type: ignore[method-assign]
                with pytest.raises(ClosedError):
                    await transport.request("PATCH", "/version", body=b"{}")
            assert server.requests == ["PATCH /version"]

    async def test_leadership_is_checked_before_the_bytes_are_sent(self) -> None:
        class ClosedError(Exception):
            pass

        answers = [None, ClosedError()]

        def gate() -> None:
            answer = answers.pop(0)
            if answer is not None:
                raise answer

        async with serving(ok) as server:
            async with connection(server.url).session("write", before_send=gate) as transport:
                await transport.request("PATCH", "/version", body=b"{}")
                with pytest.raises(ClosedError):
                    await transport.request("PATCH", "/version", body=b"{}")
            async with connection(server.url).session("watch") as transport:
                await transport.request("GET", "/version")
            assert server.requests == ["PATCH /version", "GET /version"]

    @pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
    async def test_an_undeliverable_request_is_dropped(self) -> None:
        async with (
            serving(ok) as server,
            connection(server.url).session("write", tcp_user_timeout=2.5) as transport,
        ):
            await transport.request("PATCH", "/version", body=b"{}")
            (idle,) = transport._pool._idle
            sock = idle._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500

    async def test_no_authorization_without_a_token(self) -> None:
        async def echo(request: web.BaseRequest) -> web.Response:
            return json_response({"authorization": request.headers.get("Authorization", "none")})

        async with (
            serving(echo) as server,
            connection(server.url, Token("")).session("write") as transport,
        ):
            response = await transport.request("GET", "/version")
        assert json.loads(response.body) == {"authorization": "none"}

    async def test_server_behind_a_path(self) -> None:
        async with (
            serving(ok) as server,
            connection(f"{server.url}/k8s/clusters/c-1/").session("write") as transport,
        ):
            await transport.request("GET", "/api/v1/pods")
        assert server.requests == ["GET /k8s/clusters/c-1/api/v1/pods"]

    async def test_a_name_cannot_change_the_path(self) -> None:
        async with serving(ok) as server, connection(server.url).session("write") as transport:
            await transport.request("GET", "/api/v1/namespaces/a/pods/x?watch=true#y")
            assert server.requests == ["GET /api/v1/namespaces/a/pods/x%3Fwatch=true%23y"]
            with pytest.raises(ApiError, match="not a path of the API"):
                await transport.request("GET", "/api/v1/namespaces/a/pods/../secrets/x")

    async def test_an_error_response(self) -> None:
        async def refuse(request: web.BaseRequest) -> web.Response:
            status = {"kind": "Status", "reason": "Conflict", "message": "taken"}
            return json_response(status, 409, {"Retry-After": "2"})

        async with serving(refuse) as server, connection(server.url).session("write") as transport:
            with pytest.raises(ApiError) as caught:
                await transport.request("DELETE", "/api/v1/namespaces/a/pods/b")
        error = caught.value
        assert (error.status, error.reason, error.message) == (409, "Conflict", "taken")
        assert error.retry_after == 2.0

    async def test_a_redirect_is_not_followed(self) -> None:
        async def login(request: web.BaseRequest) -> web.Response:
            raise web.HTTPFound("/login")

        async with serving(login) as server, connection(server.url).session("write") as transport:
            with pytest.raises(ApiError, match="302 Found"):
                await transport.request("GET", "/api/v1/pods")
        assert server.requests == ["GET /api/v1/pods"]

    @pytest.mark.parametrize(
        "reply",
        [
            b"",
            b"SSH-2.0-OpenSSH_9.2\r\n",
            OK + b"Content-Length: 100\r\n\r\n{",
            OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
            OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope",
            b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\n{",
        ],
        ids=["nothing", "not http", "short", "short chunk", "not gzip", "short error"],
    )
    async def test_a_lost_response(self, reply: bytes) -> None:
        async with serving_bytes(reply) as url, connection(url).session("write") as transport:
            with pytest.raises(Disconnected, match="POST /api/v1/pods: "):
                await transport.request("POST", "/api/v1/pods")

    async def test_an_unreachable_server(self) -> None:
        async with serving(ok) as server:
            pass
        async with connection(server.url).session("write") as transport:
            with pytest.raises(Disconnected, match="GET /version: "):
                await transport.request("GET", "/version")

    async def test_a_server_that_never_responds(self) -> None:
        async def hang(request: web.BaseRequest) -> web.Response:
            await server.hang()
            return await ok(request)

        async with serving(hang) as server, connection(server.url).session("write") as transport:
            with pytest.raises(Disconnected, match="timed out"):
                await transport.request("GET", "/version", timeout=0.05)


class TestTokenExpiry:
    """401: the token is renewed and the request sent once more."""

    @staticmethod
    def accepting(token: str) -> Callable[[web.BaseRequest], "asyncio.Future[web.Response]"]:
        async def answer(request: web.BaseRequest) -> web.Response:
            if request.headers["Authorization"] != token:
                return json_response({"kind": "Status", "reason": "Unauthorized"}, 401)
            return json_response({"body": await request.text()})

        return answer

    async def test_a_renewed_token_is_used_at_once(self) -> None:
        token = Token("Bearer old", renewed="Bearer new")
        async with (
            serving(self.accepting("Bearer new")) as server,
            connection(server.url, token).session("write") as transport,
        ):
            response = await transport.request("PUT", "/x", body=b"whole")
            assert json.loads(response.body) == {"body": "whole"}
            await transport.request("GET", "/x")
        assert (len(server.requests), token.renewals) == (3, 1)

    async def test_many_refused_requests_renew_it_once(self) -> None:
        token = Token("Bearer old", renewed="Bearer new")
        async with (
            serving(self.accepting("Bearer new")) as server,
            connection(server.url, token).session("write") as transport,
        ):
            await asyncio.gather(*(transport.request("GET", "/x") for _ in range(20)))
        assert token.renewals == 1

    @pytest.mark.parametrize(
        ("renewed", "requests"),
        [("Bearer old", 1), ("Bearer other", 2)],
        ids=["the renewed token is the same", "the renewed token is refused too"],
    )
    async def test_a_refused_new_token_is_an_error(self, renewed: str, requests: int) -> None:
        token = Token("Bearer old", renewed=renewed)
        async with (
            serving(self.accepting("Bearer new")) as server,
            connection(server.url, token).session("write") as transport,
        ):
            with pytest.raises(ApiError, match="401 Unauthorized"):
                await transport.request("GET", "/x")
        assert len(server.requests) == requests

    async def test_a_watch_is_opened_with_the_renewed_token(self) -> None:
        token = Token("Bearer old", renewed="Bearer new")
        async with (
            serving(self.accepting("Bearer new")) as server,
            connection(server.url, token).session("watch") as transport,
            transport.stream("/x", query={}, total=10) as chunks,
        ):
            assert [chunk async for chunk in chunks] == [b'{"body": ""}']


async def test_everything_is_observed() -> None:
    outcomes: list[tuple[str, str, int]] = []

    def observe(verb: str, resource: str, code: int, seconds: float) -> None:
        assert 0 <= seconds < 600
        outcomes.append((verb, resource, code))

    async def answer(request: web.BaseRequest) -> web.Response:
        return json_response({}, 404 if request.method == "DELETE" else 200)

    async with (
        serving(answer) as server,
        connection(server.url).session("write", observe) as transport,
    ):
        await transport.request("GET", "/api/v1/namespaces/a/pods/b")
        with pytest.raises(ApiError):
            await transport.request("DELETE", "/apis/batch/v1/namespaces/a/jobs/b")
        async with transport.stream("/apis/batch/v1/jobs", query={}, total=5):
            pass
    async with connection(server.url).session("write", observe) as transport:
        with pytest.raises(Disconnected):
            await transport.request("GET", "/version")
    assert outcomes == [
        ("get", "pods", 200),
        ("delete", "jobs.batch", 404),
        ("watch", "jobs.batch", 200),
        ("get", "version", 0),
    ]


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/pods", "pods"),
        ("/api/v1/namespaces/a/pods", "pods"),
        ("/api/v1/namespaces/a/pods/b/status", "pods/status"),
        ("/api/v1/namespaces/a/pods/b:8080/proxy/v1/upload", "pods/proxy"),
        ("/apis/torchrun.ai/v1alpha1/torchrunjobs", "torchrunjobs.torchrun.ai"),
        ("/apis/batch/v1/namespaces/a/jobs/b", "jobs.batch"),
        ("/api/v1/namespaces", "namespaces"),
        ("/api/v1/namespaces/a", "namespaces"),
        ("/api/v1/nodes/n", "nodes"),
        ("/api/v1", ""),
        ("/readyz", "readyz"),
        ("/", ""),
    ],
)
def test_resource_of_a_path(path: str, resource: str) -> None:
    assert resource_of(path) == resource
