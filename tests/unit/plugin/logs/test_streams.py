"""Logs over broken connections, and the merge of several logs."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from aiohttp import web

from kubectl_torchrun.cluster.backoff import Retries
from kubectl_torchrun.cluster.client import Api, split_lines
from kubectl_torchrun.cluster.http_client import HttpClient
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.slices import JobSlice
from kubectl_torchrun.logs.follow import follow
from kubectl_torchrun.logs.streams import ALL, Cursor, LineFormat, View, Window, merged
from kubectl_torchrun.terminal import Display
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod
from web_server import listening

from ..api_server import refusal
from ..laptop import Laptop

HASTY = Retries(first=0.001, longest=0.01, give_up=120)


def stamped(second: int, nano: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02}.{nano:09}Z {text}\n"


class Kubelet:
    """Serves the logs of pods as a kubelet does; `cuts`: bytes after which a connection
    breaks; `ends`: after which the log ends early without an error."""

    def __init__(self, **logs: list[str]) -> None:
        self.logs = logs
        self.cuts: list[int] = []
        self.ends: list[int] = []
        self.since: list[str | None] = []
        self.pods: list[Pod] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Api]:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/ns/pods/{pod}/log", self._log)
        app.router.add_get("/api/v1/namespaces/ns/pods", self._list)
        runner = web.AppRunner(app, shutdown_timeout=1)
        async with (
            listening(runner) as port,
            HttpClient(f"http://127.0.0.1:{port}") as client,
        ):
            yield Api(client, "ns", HASTY)

    async def _list(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode({"items": self.pods})
        return web.Response(body=body, content_type="application/json")

    async def _log(self, request: web.Request) -> web.StreamResponse:
        assert request.query["timestamps"] == "true"
        since = request.query.get("sinceTime")
        self.since.append(since)
        lines = self.logs.get(request.match_info["pod"])
        if lines is None:
            return refusal(500, "dial tcp 10.0.0.7:10250: i/o timeout")
        # The kubelet compares whole seconds.
        kept = [line for line in lines if since is None or line[:19] >= since[:19]]
        body = "".join(kept).encode()
        response = web.StreamResponse()
        await response.prepare(request)
        if self.cuts:
            await response.write(body[: self.cuts.pop(0)])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(body[: self.ends.pop(0)] if self.ends else body)
        return response


def worker(rank: int, ended: bool = True) -> Pod:
    labels = {
        "app.kubernetes.io/component": "worker",
        "batch.kubernetes.io/job-completion-index": str(rank),
    }
    state: JsonObject = {"terminated": {"exitCode": 0}} if ended else {"running": {}}
    pod: JsonObject = {
        "metadata": {"name": f"p{rank}", "uid": f"u{rank}", "labels": dict(labels)},
        "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": state}]},
    }
    return msgspec.convert(pod, Pod)


async def run(api: Api, job_watch: JobWatch, terminal: Display, *ranks: int) -> int:
    return await follow(
        api, job_watch, terminal, Narrator(job_watch, terminal), View(frozenset(ranks))
    )


LINES = [stamped(n // 4, n, f"line {n}") for n in range(20)]
TEXTS = [f"line {n}".encode() for n in range(20)]


async def test_a_log_resumes_after_the_last_line() -> None:
    kubelet = Kubelet(p=LINES)
    async with kubelet.serve() as api:
        cursor = Cursor(api, "p")
        first = [line async for line in cursor.read(follow=True, has_ended=False)]
        kubelet.logs["p"] = [*LINES, stamped(4, 999, "late")]
        again = [line async for line in cursor.read(follow=True, has_ended=False)]
    assert first == TEXTS
    assert again == [b"late"]
    assert kubelet.since == [None, "2026-01-01T00:00:04.000000019Z"]


@pytest.mark.parametrize("ends", [[], [100, 0, 200]])
@pytest.mark.parametrize("cuts", [[], [1], [200, 90, 0, 300], [len(LINES[0]), len(LINES[0]) + 3]])
async def test_following_neither_loses_nor_repeats_lines(cuts: list[int], ends: list[int]) -> None:
    kubelet = Kubelet(p0=LINES)
    kubelet.cuts, kubelet.ends = list(cuts), list(ends)
    out = io.StringIO()
    async with kubelet.serve() as api:
        job_watch = JobWatch(api, "job")
        job_watch.show_job(msgspec.convert({"status": {"phase": "Succeeded"}}, JobSlice))
        kubelet.pods = [worker(0, ended=False)]

        class Watched(Display):
            def log(self, rank: int, line: bytes, *, prefix: bool = True) -> None:
                super().log(rank, line, prefix=prefix)
                if not kubelet.cuts and not kubelet.ends:
                    job_watch.show_pods({"p0": worker(0)})

        assert await run(api, job_watch, Watched(out, io.StringIO())) == 0
    assert out.getvalue() == "".join(f"[0] line {n}\n" for n in range(20))
    assert not kubelet.cuts


async def test_workers_before_the_first_watch_event_are_read() -> None:
    kubelet = Kubelet(p0=LINES[:1])
    kubelet.pods = [worker(0)]
    out = io.StringIO()
    async with kubelet.serve() as api:
        job_watch = JobWatch(api, "job")
        job_watch.show_job(msgspec.convert({"status": {"phase": "Succeeded"}}, JobSlice))
        assert await run(api, job_watch, Display(out, io.StringIO())) == 0
    assert out.getvalue() == "[0] line 0\n"


async def test_selected_ranks_and_the_root_cause() -> None:
    kubelet = Kubelet(p0=LINES[:2], p1=LINES[2:4])
    out, err = io.StringIO(), io.StringIO()
    failure = {"node": "n", "rank": 1, "exitCode": 137, "reason": "OOMKilled", "message": "memory"}
    async with kubelet.serve() as api:
        job_watch = JobWatch(api, "job")
        kubelet.pods = [worker(0), worker(1)]
        status = {"phase": "Failed", "lastFailure": failure}
        job_watch.show_job(msgspec.convert({"status": status}, JobSlice))
        assert await run(api, job_watch, Display(out, err), 1) == 1
    assert out.getvalue() == "[1] line 2\n[1] line 3\n"
    assert err.getvalue().splitlines() == [
        "Failed",
        "Root cause (rank 1, n, exit code 137): OOMKilled: memory",
    ]


async def test_a_deleted_job_ends_the_following() -> None:
    async with Kubelet().serve() as api:
        job_watch = JobWatch(api, "job")
        job_watch.show_job(None)
        job_watch.show_pods({})
        err = io.StringIO()
        assert await run(api, job_watch, Display(io.StringIO(), err)) == 1
    assert "deleted" in err.getvalue()


async def test_many_logs_are_merged_by_time() -> None:
    logs = {f"p{rank}": LINES[rank::3] for rank in range(3)}
    async with Kubelet(**logs, p3=[]).serve() as api:
        cursors = [(rank, Cursor(api, f"p{rank}")) for rank in range(4)]
        got = [(rank, line) async for rank, line in merged(cursors, ALL, pytest.fail)]
    assert got == [(n % 3, TEXTS[n]) for n in range(20)]


async def test_a_kubelet_that_does_not_answer_costs_only_its_own_lines() -> None:
    notes: list[str] = []
    async with Kubelet(p=LINES).serve() as api:
        cursors = [(0, Cursor(api, "lost")), (1, Cursor(api, "p"))]
        got = [line async for _, line in merged(cursors, ALL, notes.append)]
    assert got == TEXTS
    assert notes == ["Cannot read the log of node 0: dial tcp 10.0.0.7:10250: i/o timeout"]


async def test_lines_have_timestamps() -> None:
    view = View(line_format=LineFormat(timestamps=True))
    async with Kubelet(p=LINES).serve() as api:
        lines = [line async for _, line in merged([(0, Cursor(api, "p", view))], view, pytest.fail)]
    assert lines == [line.rstrip("\n").encode() for line in LINES]


def test_the_timestamp_stays_before_a_line_with_carriage_returns() -> None:
    line_format = LineFormat(timestamps=True)
    assert line_format.format(b"T", b"10 %\r20 %\r") == b"T 20 %"
    assert line_format.format(b"", b"no time") == b"no time"


def ends(laptop: Laptop) -> None:
    """Its pod first: `logs --follow` waits for the last lines of a pod that runs."""
    laptop.worker("run", 0, 1, LINES[0], LINES[1], LINES[2], terminated={"exitCode": 0})
    laptop.job("run", status={"phase": "Succeeded"})


@pytest.mark.long
def test_line_flags_apply_with_and_without_follow(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running"})
    laptop.worker("run", 0, 1, LINES[0], LINES[1], LINES[2])
    words = ("--timestamps", "--no-prefix")
    expected = LINES[0] + LINES[1] + LINES[2]
    assert laptop.run("logs", "run", *words).stdout == expected
    laptop.once_watched(lambda: ends(laptop))
    followed = laptop.run("logs", "run", "--follow", *words)
    assert (followed.exit_code, followed.stdout) == (0, expected)


async def test_a_cut_line_is_read_again_completely() -> None:
    kubelet = Kubelet(p=[LINES[0], "2026-01-01T00:00:00.000000001Z li"])
    async with kubelet.serve() as api:
        cursor = Cursor(api, "p")
        assert [line async for line in cursor.read(follow=True, has_ended=False)] == TEXTS[:1]
        kubelet.logs["p"] = LINES[:2]
        assert [line async for line in cursor.read(follow=True, has_ended=False)] == TEXTS[1:2]
        kubelet.logs["p"] = [*LINES[:2], "2026-01-01T00:00:09.000000000Z no line end"]
        assert [line async for line in cursor.read(follow=True, has_ended=True)] == [b"no line end"]


async def test_lines_of_the_kubelet_are_not_lines_of_the_container() -> None:
    kubelet = Kubelet(p=[LINES[0], "unable to retrieve container logs for containerd://f0dc\n"])
    async with kubelet.serve() as api:
        cursor = Cursor(api, "p")
        assert [line async for line in cursor.read(follow=True, has_ended=True)] == TEXTS[:1]
    assert cursor.stamp == LINES[0].encode().partition(b" ")[0]


async def test_lines_are_split_at_line_feeds_only_and_bounded() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b"a\rb\x0b", b"c\n\nd", b"e\n", b"x" * (1 << 20), b"yz", b"y\nlast"):
            yield chunk

    lines = [line async for line in split_lines(chunks())]
    assert lines == [b"a\rb\x0bc\n", b"\n", b"de\n", b"x" * (1 << 20) + b"\n", b"last"]


def test_a_late_clock_delays_no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    shown: list[bytes] = []
    window = Window(lambda node, line: shown.append(line))
    window.add(b"8", 0, b"of node 0")
    for at in (1, 2, 3):
        now = at / 10
        window.add(b"%d" % at, 1, b"of node 1")
    window.flush()
    assert shown == [b"of node 1"] * 3 + [b"of node 0"]
    window.add(b"9", 0, b"next")
    window.flush()
    assert shown[4:] == []
    now = 1.0
    window.flush()
    assert shown[4:] == [b"next"]
