"""Reports of workers over real sockets: which senders and values are accepted."""

import asyncio
import base64

import msgspec
import pytest

from torchrun_api.kinds.status import Progress
from torchrun_controller.cache.progress_reports import ReportingWorker, Reports
from torchrun_controller.reconcile.model.observed import RestartsInPlace
from torchrun_controller.serving.progress import endpoint
from unit.serving.progress.reporting import JOB, NOW, POD, World, running, token

BRACKETS = b'{"a":' + b"[" * 5000


async def test_a_report_of_a_worker_is_accepted() -> None:
    body = {"step": 120, "totalSteps": 1000, "loss": 2.25, "samplesPerSecond": 450.5, "new": 1}
    async with running(World()) as world:
        assert await world.post(body) == (204, "")
    assert world.accepted == [JOB]
    expected = Progress(step=120, total_steps=1000, loss=2.25, samples_per_second=450.5, time=NOW)
    assert world.reports.of(JOB, "uid-child") == expected
    assert world.reports.of(JOB, "uid-of-another-attempt") is None
    assert world.reports.newest(JOB) == expected
    assert world.reports.newest(("team", "another")) is None
    value = world.metrics.registry.get_sample_value
    assert value("torchrun_progress_reports_total", {"code": "204"}) == 1


async def test_restarts_in_place_do_not_replace_the_progress() -> None:
    failed_round = {
        "round": 2,
        "node": 1,
        "seconds": 12.5,
        "rank": 3,
        "exitCode": 137,
        "signal": 9,
        "reason": "Signaled",
        "message": "Rank 3 was killed by SIGKILL.",
        "time": "2026-01-02T03:04:05.123456Z",
    }
    async with running(World()) as world:
        assert await world.post({"step": 120}) == (204, "")
        world.time += 1
        restarts = {"count": 3, "last": [failed_round]}
        assert await world.post({"restartsInPlace": restarts}) == (204, "")
        world.time += 1
        assert await world.post({"step": 121}) == (204, "")
    assert world.reports.of(JOB, "uid-child") == Progress(step=121, time=NOW)
    report = world.reports.restarts_of(JOB, "uid-child")
    (known,) = report.last
    assert (known.round, known.node, known.signal, known.seconds) == (2, 1, 9, 12.5)
    assert report == msgspec.convert(restarts, RestartsInPlace)
    assert world.reports.restarts_of(JOB, "uid-of-another-attempt") == RestartsInPlace()


async def test_only_the_worker_of_node_0_reports_restarts() -> None:
    async with running(
        World(workers={POD: ReportingWorker(JOB, "uid-child", is_leader=False)})
    ) as world:
        assert await world.post({"restartsInPlace": {"count": 1}}) == (
            403,
            "only the worker of node 0 reports restarts\n",
        )
    assert world.reports.restarts_of(JOB, "uid-child") == RestartsInPlace()


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
async def test_other_clients_are_refused_without_a_review(
    authorization: str, code: int, reviews: int
) -> None:
    async with running(World()) as world:
        assert (await world.post(authorization=authorization))[0] == code
        assert (world.reviews, world.accepted) == (reviews, [])


async def test_a_pod_of_an_older_attempt_is_refused_although_its_token_is_good() -> None:
    async with running(World()) as world:
        assert (await world.post())[0] == 204
        world.workers.clear()
        world.time += 10
        assert (await world.post())[0] == 403


async def test_a_standby_refuses() -> None:
    async with running(World(leads=False)) as world:
        code, text = await world.post()
    assert (code, world.reviews) == (503, 0)
    assert "standby" in text


@pytest.mark.parametrize("code", [403, 500])
async def test_no_reports_without_token_reviews(code: int) -> None:
    async with running(World(review_code=code)) as world:
        assert (await world.post())[0] == 503
        world.review_code = 201
        assert (await world.post())[0] == 204


async def test_one_report_per_second_is_accepted() -> None:
    async with running(World()) as world:
        assert [(await world.post())[0] for _ in range(3)] == [204, 429, 429]


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
        (b'{"a": "' + b"x" * 17_000 + b'"}', 413),
        (b'{"loss": 1e999}', 400),
        (b'{"samplesPerSecond": -1}', 400),
        (b'{"loss": -3}', 204),
        (BRACKETS[:1024], 400),
        (b'{"restartsInPlace": {"count": -1}}', 400),
        (b'{"restartsInPlace": {"count": 1, "last": [{"reason": "no reason"}]}}', 400),
    ],
)
async def test_bodies(body: bytes, code: int) -> None:
    async with running(World()) as world:
        assert (await world.post(body))[0] == code
        assert world.accepted == ([JOB] if code == 204 else [])


async def test_other_paths_do_not_exist() -> None:
    async with running(World()) as world:
        assert (await world.post(path="/metrics"))[0] == 404


async def test_a_slow_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BODY_SECONDS", 0.1)
    async with running(World()) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = f"POST /v1/progress HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token()}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_a_report_of_a_job_that_just_ended_is_dropped() -> None:
    async with running(World()) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = f"POST /v1/progress HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token()}\r\n"
        writer.write(f"{head}Content-Length: 10\r\n\r\n".encode())
        async with asyncio.timeout(60):
            while not world.reviews:  # noqa: ASYNC110 it is over the wire
                await asyncio.sleep(0)
        world.workers.clear()
        writer.write(b'{"step":1}')
        assert b" 403 " in await reader.readline()
        assert world.reports.totals().jobs == 0
        writer.close()


def test_totals_exclude_silent_jobs() -> None:
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


CHECKPOINTS = {"checkpoints": [{"step": 7, "path": "/c/7", "time": "2026-01-02T03:04:05Z"}]}


async def test_node_0_reports_checkpoints_also_while_it_ends_after_its_attempt() -> None:
    current = ReportingWorker(JOB, "uid-child", job_uid="uid-job")
    async with running(World(workers={POD: current})) as world:
        assert await world.post(CHECKPOINTS) == (204, "")
        assert world.reports.newest(JOB) is None
        (known,) = world.reports.checkpoints_of(JOB, "uid-job")
        assert (known.step, known.path) == (7, "/c/7")
        assert world.reports.checkpoints_of(JOB, "uid-of-another") == ()
        world.time += 1
        world.workers[POD] = ReportingWorker(JOB, "", job_uid="uid-job", is_current=False)
        assert await world.post(CHECKPOINTS) == (204, "")
        world.time += 1
        assert (await world.post({"step": 1}))[0] == 403
        world.workers[POD] = ReportingWorker(JOB, "uid-child", is_leader=False)
        assert (await world.post(CHECKPOINTS))[0] == 403


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"step": 2**60},
        {"path": ""},
        {"path": "x" * 1025},
        {"time": "now"},
        {"path": 1},
    ],
)
async def test_invalid_checkpoints_are_refused(wrong: dict[str, object]) -> None:
    body = {"checkpoints": [{**CHECKPOINTS["checkpoints"][0], **wrong}]}
    async with running(World()) as world:
        assert (await world.post(body))[0] == 400
        assert (await world.post({"checkpoints": CHECKPOINTS["checkpoints"] * 4}))[0] == 400
