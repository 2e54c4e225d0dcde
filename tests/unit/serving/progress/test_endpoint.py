"""Reports over real sockets; the API server's TokenReview is played, the rest is the real thing."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
import structlog
from aiohttp import web

from scripted_server import connection, json_response, serving
from torchrun_api.status import Progress
from torchrun_controller.cache.progress_reports import Reports, Worker
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.serving.progress import connection_limit, endpoint, tokens
from torchrun_controller.serving.progress.endpoint import ProgressServer
from torchrun_controller.serving.progress.tokens import BusyError, Tokens

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
JOB = ("ml", "train")
POD = ("ml", "train-0-abcde", "uid-pod")


BRACKETS = b'{"a":' + b"[" * 5000


def token(
    pod: tuple[str, str, str] = POD, audience: str = "torchrun.ai/progress", expires: float = 3600
) -> str:
    namespace, name, uid = pod
    claims = {
        "aud": [audience],
        "exp": NOW.timestamp() + expires,
        "kubernetes.io": {"namespace": namespace, "pod": {"name": name, "uid": uid}},
    }
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{payload}.signature"


@dataclass
class World:
    """A controller's port, an API server that knows one good token, and one worker."""

    port: int = 0
    leads: bool = True
    time: float = 1000.0
    workers: dict[tuple[str, str, str], Worker] = field(
        default_factory=lambda: {POD: Worker(JOB, "uid-child")}
    )
    bound_to: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # others than POD
    good: set[str] = field(default_factory=lambda: {token()})
    audiences: list[str] = field(default_factory=lambda: ["torchrun.ai/progress"])
    review_code: int = 201
    reviews: int = 0
    accepted: list[tuple[str, str]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    reports: Reports = field(default_factory=Reports)
    observed: int = 0

    def job_of(self, namespace: str, pod: str, uid: str) -> tuple[str, str] | None:
        worker = self.workers.get((namespace, pod, uid))
        return worker.job if worker else None

    def worker(self, namespace: str, pod: str, uid: str) -> Worker | None:
        self.observed += 1
        return self.workers.get((namespace, pod, uid))

    async def review(self, request: web.BaseRequest) -> web.Response:
        self.reviews += 1
        if self.review_code != 201:
            return json_response({"message": "no"}, self.review_code)
        spec = (await request.json())["spec"]
        assert spec["audiences"] == ["torchrun.ai/progress"]
        if spec["token"] not in self.good:
            return json_response({"status": {"error": "invalid"}}, 201)
        namespace, *identity = self.bound_to.get(spec["token"], POD)
        extra = {
            f"authentication.kubernetes.io/pod-{k}": [v]
            for k, v in zip(("name", "uid"), identity, strict=True)
        }
        user = {"username": f"system:serviceaccount:{namespace}:default", "extra": extra}
        status = {"authenticated": True, "audiences": self.audiences, "user": user}
        return json_response({"status": status}, 201)

    async def post(
        self, body: Any = None, authorization: str | None = None, path: str = "/v1/progress"
    ) -> tuple[int, str]:
        """The code, and what is told."""
        data = body if isinstance(body, bytes) else json.dumps(body or {"step": 3}).encode()
        bearer = f"Bearer {token()}" if authorization is None else authorization
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{self.port}{path}",
                data=data,
                headers={"Authorization": bearer},
            ) as answer,
        ):
            return answer.status, await answer.text()


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    world.reports = Reports(lambda: world.time)
    async with serving(world.review) as api, connection(api.url).session("review") as transport:
        server = ProgressServer(
            "127.0.0.1",
            0,
            leads=lambda: world.leads,
            tokens=Tokens(transport, clock=lambda: world.time, now=NOW.timestamp),
            workers=world,
            reports=world.reports,
            accepted=world.accepted.append,
            metrics=world.metrics,
            clock=lambda: world.time,
            now=lambda: NOW,
        )
        async with server.running():
            world.port = server.port
            yield world


@asynccontextmanager
async def connection_to(world: World) -> AsyncIterator[Tokens]:
    """Verdicts on tokens without an endpoint before them."""
    async with serving(world.review) as api, connection(api.url).session("review") as transport:
        yield Tokens(transport, clock=lambda: world.time, now=NOW.timestamp)


async def test_a_workers_report_is_taken() -> None:
    body = {"step": 120, "totalSteps": 1000, "loss": 2.25, "samplesPerSecond": 450.5, "new": 1}
    async with running(World()) as world:
        assert await world.post(body) == (204, "")
    assert world.accepted == [JOB]
    expected = Progress(step=120, total_steps=1000, loss=2.25, samples_per_second=450.5, time=NOW)
    assert world.reports.of(JOB, "uid-child") == expected
    assert world.reports.of(JOB, "uid-of-another-attempt") is None
    value = world.metrics.registry.get_sample_value
    assert value("torchrun_progress_reports_total", {"code": "204"}) == 1


async def test_a_verdict_is_kept_for_a_minute() -> None:
    async with running(World()) as world:
        for _ in range(5):
            assert (await world.post())[0] == 204
            world.time += 10
        assert world.reviews == 1
        world.time += 20
        assert (await world.post())[0] == 204
        assert world.reviews == 2


async def test_a_verdict_is_kept_no_longer_than_the_token_lives() -> None:
    short = token(expires=5)
    async with running(World(good={short})) as world:
        assert (await world.post(authorization=f"Bearer {short}"))[0] == 204
        world.time += 6
        assert (await world.post(authorization=f"Bearer {short}"))[0] == 204
        assert world.reviews == 2


@pytest.mark.parametrize(
    ("authorization", "code", "reviews"),
    [
        ("", 401, 0),
        ("Basic YTpi", 401, 0),
        ("Bearer nonsense", 401, 0),
        ("Bearer a.b.c", 401, 0),
        ("Bearer e30.bnVsbA.x", 401, 0),
        (f"Bearer {token(audience='https://kubernetes.default.svc')}", 401, 0),
        (f"Bearer {token(expires=-1)}", 401, 0),
        (f"Bearer {token(pod=('ml', 'other', 'uid-pod'))}", 403, 0),
        (f"Bearer {token(pod=('ml', 'train-0-abcde', ''))}", 403, 0),
        (f"Bearer {token()}forged", 401, 1),
        ("Bearer " + "x" * 8000, 401, 0),
        (f"Bearer a.{base64.urlsafe_b64encode(BRACKETS).decode()}.b", 401, 0),
    ],
)
async def test_who_is_no_worker_is_refused_and_strangers_cost_no_review(
    authorization: str, code: int, reviews: int
) -> None:
    async with running(World()) as world:
        assert (await world.post(authorization=authorization))[0] == code
        assert (world.reviews, world.accepted) == (reviews, [])


async def test_what_the_api_server_says_counts_and_not_the_claims() -> None:
    """A token whose claims name a worker, and whose review names another pod."""
    other = ("ml", "theirs-0", "uid-theirs")
    stolen = token(pod=other)
    world = World(workers={other: Worker(("ml", "theirs"), "uid-child")}, good={stolen})
    async with running(world):
        assert (await world.post(authorization=f"Bearer {stolen}"))[0] == 403
    assert world.accepted == []


async def test_a_server_that_ignores_audiences_proves_nothing() -> None:
    async with running(World(audiences=[])) as world:
        assert (await world.post())[0] == 401


async def test_a_pod_of_an_older_attempt_is_refused_although_its_token_is_good() -> None:
    async with running(World()) as world:
        assert (await world.post())[0] == 204
        world.workers.clear()
        world.time += 10
        assert (await world.post())[0] == 403


async def test_a_standby_refuses() -> None:
    async with running(World(leads=False)) as world:
        code, told = await world.post()
    assert (code, world.reviews) == (503, 0)
    assert "stands by" in told


@pytest.mark.parametrize("code", [403, 500])
async def test_without_reviews_there_are_no_reports(code: int) -> None:
    async with running(World(review_code=code)) as world:
        assert (await world.post())[0] == 503
        world.review_code = 201
        assert (await world.post())[0] == 204


async def test_one_report_in_a_second_is_enough() -> None:
    async with running(World()) as world:
        assert [(await world.post())[0] for _ in range(3)] == [204, 429, 429]


THEIRS = ("evil", "theirs-0", "uid-theirs")


async def test_who_forges_tokens_of_its_own_pod_silences_nobody_else() -> None:
    workers = {POD: Worker(JOB, "uid-child"), THEIRS: Worker(("evil", "theirs"), "uid-other")}
    async with running(World(workers=workers)) as world:
        with structlog.testing.capture_logs() as lines:
            forged = [f"Bearer {token(THEIRS)}{n}" for n in range(100)]
            codes = [(await world.post(authorization=a))[0] for a in forged]
        assert codes == [401] * 3 + [503] * 97
        assert world.reviews == 3
        assert world.observed == 0, "nothing is looked at before the token is verified"
        assert [line["event"] for line in lines] == ["reports of progress are refused"]
        assert (await world.post())[0] == 204


async def test_neither_do_many_pods_of_a_namespace() -> None:
    theirs = [("evil", f"theirs-{n}", f"uid-{n}") for n in range(120)]
    workers = {pod: Worker(("evil", "theirs"), "uid-other") for pod in theirs}
    async with running(World(workers={POD: Worker(JOB, "uid-child"), **workers})) as world:
        codes = [
            (await world.post(authorization=f"Bearer {token(pod)}{n}"))[0]
            for n in range(3)
            for pod in theirs
        ]
        assert codes.count(401) == world.reviews == 50
        assert (await world.post())[0] == 204


async def test_a_token_that_was_verified_is_reviewed_again_whatever_others_forge() -> None:
    async with running(World()) as world:
        assert (await world.post())[0] == 204
        world.time += 61
        for n in range(5):
            await world.post(authorization=f"Bearer {token()}{n}")
        assert world.reviews == 4
        assert (await world.post())[0] == 204
        assert world.reviews == 5


async def test_who_names_another_pod_takes_nothing_of_that_pods_bucket() -> None:
    async with running(World()) as world, connection_to(world) as verdicts:
        claims = verdicts.claims(token())
        assert claims is not None
        for n in range(3):
            assert await verdicts.pod_of(f"{token()}{n}", claims, "10.0.0.66") is None
        with pytest.raises(BusyError, match="too many tokens that name pod train-0-abcde"):
            await verdicts.pod_of(f"{token()}4", claims, "10.0.0.66")
        assert await verdicts.pod_of(token(), claims, "10.0.0.7") is not None


async def test_a_token_that_is_not_believed_any_more_is_forgotten() -> None:
    async with running(World()) as world:
        assert (await world.post())[0] == 204
        world.good.clear()
        world.time += 61
        assert (await world.post())[0] == 401
        world.time += 5
        assert (await world.post())[0] == 401
        assert world.reviews == 2, "a refusal is believed for a while"


@pytest.mark.parametrize("junk", [b"\xff", b"\xc3\xa9", b"\x7f", b" x", b".x"])
async def test_a_token_of_other_bytes_is_no_token(junk: bytes) -> None:
    async with running(World()) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = (
            b"POST /v1/progress HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nAuthorization: Bearer "
        )
        writer.write(head + token().encode() + junk + b"\r\n\r\n{}")
        answer = await reader.readline()
        # A byte that no header may have is refused by the HTTP parser.
        assert answer.split()[1] in ((b"400",) if junk == b"\x7f" else (b"401",))
        assert world.reviews == 0
        writer.close()


async def test_kept_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_CACHED", 2)
    world = World()
    async with connection_to(world) as verdicts:
        claims = verdicts.claims(token())
        assert claims is not None
        for source, n in enumerate((1, 2, 3, 1)):
            assert await verdicts.pod_of(f"{token()}{n}", claims, str(source)) is None
        assert world.reviews == 4


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"step": "1"}', 400),
        (b'{"step": -1}', 400),
        (b'{"step": 9007199254740993}', 400),
        (b'{"step": 1.5}', 400),
        (b'{"a": "' + b"x" * 2000 + b'"}', 413),
        (b'{"loss": 1e999}', 400),
        (b'{"samplesPerSecond": -1}', 400),
        (b'{"loss": -3}', 204),
        (BRACKETS[:1024], 400),
    ],
)
async def test_bodies(body: bytes, code: int) -> None:
    async with running(World()) as world:
        assert (await world.post(body))[0] == code
        assert world.accepted == ([JOB] if code == 204 else [])


async def test_other_pages_are_not_there() -> None:
    async with running(World()) as world:
        assert (await world.post(path="/metrics"))[0] == 404


async def test_a_slow_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BODY_SECONDS", 0.1)
    async with running(World()) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = f"POST /v1/progress HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token()}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_connections_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "CONNECTIONS", 2)
    monkeypatch.setattr(connection_limit, "CONNECTION_SECONDS", 0.3)
    async with running(World()) as world:
        held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(aiohttp.ClientError):
            await world.post()
        for reader, writer in held:
            assert await reader.read() == b"", "ended by the server"
            writer.close()
        assert (await world.post())[0] == 204


async def test_who_opens_many_connections_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "CONNECTIONS", 4)
    async with running(World()) as world:
        held = [
            await asyncio.open_connection("127.0.0.1", world.port, local_addr=("127.0.0.2", 0))
            for _ in range(6)
        ]
        assert (await world.post())[0] == 204
        ended = [reader.at_eof() for reader, _ in held]
        for _, writer in held:
            writer.close()
        assert sum(ended) >= 3, "its oldest gave way, and what came too late was turned away"


def test_uvloop_serves_and_ends_connections_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's own loop, whose transports are of other classes."""
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(connection_limit, "CONNECTIONS", 2)

    async def play() -> None:
        async with running(World()) as world:
            assert (await world.post())[0] == 204
            held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(3)]
            assert await held[2][0].read() == b"", "turned away"
            for _, writer in held:
                writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(play(), 10))


async def test_nothing_is_kept_of_a_job_that_ends_while_its_report_comes() -> None:
    async with running(World()) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = f"POST /v1/progress HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token()}\r\n"
        writer.write(f"{head}Content-Length: 10\r\n\r\n".encode())
        async with asyncio.timeout(5):
            while not world.reviews:  # noqa: ASYNC110 it is over the wire
                await asyncio.sleep(0)
        world.workers.clear()
        writer.write(b'{"step":1}')
        assert b" 403 " in await reader.readline()
        assert world.reports.totals().jobs == 0
        writer.close()


def test_totals_leave_out_who_fell_silent() -> None:
    time = [0.0]
    reports = Reports(lambda: time[0])
    reports.put(("ml", "a"), "1", Progress(samples_per_second=10))
    time[0] = 50
    reports.put(("ml", "b"), "1", Progress(samples_per_second=5))
    reports.put(("ml", "c"), "1", Progress(step=1))
    totals = reports.totals()
    assert (totals.jobs, totals.samples_per_second) == (3, 15)
    time[0] = 100
    totals = reports.totals()
    assert (totals.jobs, totals.samples_per_second) == (2, 5)
    reports.forget(("ml", "b"))
    assert reports.age(("ml", "b")) == float("inf")
