"""Watches of the API server in memory."""

import io
import json
from collections.abc import AsyncIterator, Callable, Iterator

import httpcore
import pytest
from aiohttp import web

from kubectl_torchrun.cluster import client
from kubectl_torchrun.cluster.backoff import Retries
from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.http_client import HttpClient
from kubectl_torchrun.cluster.slices import JOBS, T
from torchrun_api.kinds.kind import Kind

from ..api_server import ApiServer, refusal


class Recorder(Retries):
    """A back-off without delays. `counts`: the failures of each call."""

    counts: list[int] = []  # noqa: RUF012

    def delay(self, failures: int, chance: Callable[[], float] = lambda: 0.0) -> float:
        self.counts.append(failures)
        return 0.0


def event(annotation: str) -> web.Response:
    body = {"metadata": {"name": "run", "namespace": "ns", "annotations": {"note": annotation}}}
    line = json.dumps({"type": "MODIFIED", "object": body}) + "\n"
    return web.Response(body=io.BytesIO(line.encode()))


def answer_watches(server: ApiServer, answers: Iterator[web.Response]) -> None:
    def hook(request: web.Request) -> web.Response | None:
        return next(answers) if request.query.get("watch") else None

    server.hooks.append(hook)


@pytest.mark.parametrize("open_seconds", [1000.0, 0.0])
async def test_a_watch_that_ends_at_once_is_repeated_with_back_off(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, open_seconds: float
) -> None:
    """With 0 s, every watch counts as one that was open."""
    monkeypatch.setattr(client, "_WATCH_OPEN", open_seconds)
    monkeypatch.setattr(Recorder, "counts", [])
    server.put("torchrunjobs", "run")
    ends = [web.Response(), refusal(503, "x"), event("e"), web.Response(), web.Response()]
    answer_watches(server, iter(ends))
    async with HttpClient(server.url) as http:
        seen = 0
        async for objects in Api(http, "ns", Recorder()).watch(JOBS, {}):
            assert set(objects) == {("ns", "run")}
            seen += 1
            if seen == 7:  # six lists and an event
                break
    assert Recorder.counts == ([1, 2, 1, 2, 3] if open_seconds else [1] * 5)


async def test_the_limit_of_an_outage_begins_with_its_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    outages = [0.0, 200.0, 301.0]  # seconds since the watch was lost

    class Quiet(Api):
        async def _list_and_watch(
            self, kind: Kind[T], *_: object
        ) -> AsyncIterator[dict[tuple[str, str], T]]:
            nonlocal now
            if not now:
                yield {}
            now = 240.0 + outages.pop(0)
            raise Unreachable("the API server restarts")

    monkeypatch.setattr(client.anyio, "current_time", lambda: now)
    api = Quiet(HttpClient(""), "ns", Retries(first=0.001, longest=0.01, give_up=300.0))
    with pytest.raises(Unreachable):
        async for _ in api.watch(JOBS, {}):
            pass
    assert not outages


async def test_an_event_may_be_large(server: ApiServer) -> None:
    large = "x" * (3 << 20)
    answer_watches(server, iter([event(large)]))
    async with HttpClient(server.url) as http:
        async for objects in Api(http, "ns", Retries()).watch(JOBS, {}):
            if objects:
                assert objects["ns", "run"].metadata.annotations == {"note": large}
                return


def expired_credentials(server: ApiServer) -> list[str]:
    """The API server refuses each request once, as after the end of a token. Returns them."""
    refused: list[str] = []

    def hook(request: web.Request) -> web.Response | None:
        if server.requests[-2:].count(server.requests[-1]) == 2:
            return None  # kubectl has new credentials
        refused.append(server.requests[-1])
        return refusal(401, "Unauthorized")

    server.hooks.append(hook)
    return refused


async def test_a_request_is_repeated_with_new_credentials(server: ApiServer) -> None:
    server.put("torchrunjobs", "run", metadata={"annotations": {}})
    server.logs["pod"] = ["line\n"]
    refused = expired_credentials(server)
    async with HttpClient(server.url) as http:
        api = Api(http, "ns", Retries())
        await api.annotate(JOBS, "run", {"note": "new"})
        assert (await api.get(JOBS, "run")).metadata.annotations == {"note": "new"}
        async with api.log("pod", "trainer", {}) as lines:
            assert [line async for line in lines] == [b"line\n"]
        headers = {"X-Torchrun-Sha256": "x", "Content-Length": "4"}
        path = "/v1/upload"
        status, _ = await api.ask_pod("pod", "PUT", path, headers=headers, content=blocks)
        assert (status, bytes(server.uploaded)) == (202, b"data")
    assert len(refused) == 4


async def blocks() -> AsyncIterator[bytes]:
    for block in (b"da", b"ta"):
        yield block


async def test_a_user_who_is_not_logged_in_gets_the_error(server: ApiServer) -> None:
    server.hooks.append(lambda _: refusal(401, "Unauthorized"))
    async with HttpClient(server.url) as http:
        api = Api(http, "ns", Retries())
        with pytest.raises(RequestError, match="Unauthorized"):
            await api.get(JOBS, "run")
        with pytest.raises(RequestError, match="Unauthorized"):
            await api.ask_pod("pod", "GET", "/v1/upload")
        with pytest.raises(RequestError, match="Unauthorized"):
            async with api.log("pod", "trainer", {}):
                pass
    assert len(server.requests) == 6


PAGE = "<!DOCTYPE html><html><head><title>Sign in &amp; go</title></head><body>x</body></html>"


@pytest.mark.parametrize(
    ("code", "text", "message"),
    [
        (200, PAGE, "The server of the cluster answered with a web page (Sign in & go)."),
        (200, "<html>no title</html>", "The server of the cluster answered with a web page."),
        (404, PAGE, "The server of the cluster answered with a web page (Sign in & go)."),
        (502, PAGE, "Cannot connect to the API server: a web page (Sign in & go)"),
        (503, PAGE, "a web page (Sign in & go)"),
        (502, "", "Cannot connect to the API server: HTTP 502"),
        (500, "dial tcp: refused", "Cannot connect to the API server: dial tcp: refused"),
        (403, "", "the API server returned HTTP 403"),
    ],
)
async def test_what_is_no_answer_of_an_api_server_is_told_in_a_sentence(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, code: int, text: str, message: str
) -> None:
    monkeypatch.setattr(client, "_BUSY_SECONDS", 0.0)
    server.hooks.append(lambda _: web.Response(status=code, text=text))
    async with HttpClient(server.url) as http:
        with pytest.raises((Unreachable, RequestError)) as caught:
            await Api(http, "ns", Retries(first=0.001)).get(JOBS, "run")
    error = caught.value
    assert (error.message if isinstance(error, RequestError) else str(error)) == message


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (httpcore.ReadTimeout(), "it does not answer"),
        (httpcore.ConnectTimeout(), "it does not answer"),
        (httpcore.ReadError(), "no reason was given"),
        (
            httpcore.ConnectError(FileNotFoundError(2, "No such file or directory")),
            "No such file or directory",
        ),
    ],
)
async def test_an_error_of_the_connection_has_words(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(HttpClient, "request", fail)
    with pytest.raises(Unreachable) as caught:
        await Api(HttpClient(), "ns", Retries()).get(JOBS, "run")
    assert str(caught.value).rstrip(".") == f"Cannot connect to the API server: {message}"


async def test_a_slow_answer_and_a_busy_server_are_told_once(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "SLOW_SECONDS", 0.05)
    server.put("torchrunjobs", "run")
    busy = [refusal(500, "etcd has no leader") for _ in range(4)]
    server.hooks.append(lambda _: busy.pop() if busy else None)
    async with HttpClient(server.url) as http:
        api = Api(http, "ns", Retries(first=0.2, longest=0.2))
        await api.get(JOBS, "run")
    # On a busy machine the first answer may be slow, and that is told instead.
    told = capsys.readouterr().err.splitlines()
    assert told[0] in ("etcd has no leader", "The API server does not answer yet.")
    assert told[1:] == ["Still trying. Press Ctrl-C to stop."]
