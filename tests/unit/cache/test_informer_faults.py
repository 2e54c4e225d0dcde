"""Known faults of watchers in other clients, each by its name."""

import asyncio

import structlog
from aiohttp import web

from frames import bookmark, error, frame, page, pod
from informing import PATIENCE, Harness, Play, added, breaks, gives, informing, refuses, sends
from scripted_server import Token, streamed
from torchrun_controller.watch import Timings

TIMINGS = Timings(silence=50.0, short_lived=0.0)


def fall_silent(harness: Harness) -> None:
    """Shorten the silence limit of the open watch. From the start, it would also limit the opening."""
    (protocol,) = harness.informer._transport._rest._current.rest.pool_manager.connector._acquired
    assert protocol.read_timeout == TIMINGS.silence
    protocol.read_timeout = 0.01
    protocol.start_timeout()


class TestKnownFaults:
    """Known faults of Python watchers."""

    async def test_dead_silent_watch(self) -> None:
        play = Play()

        async def silent(request: web.BaseRequest) -> web.StreamResponse:
            response = await streamed(request, bookmark(9, end=True))
            await harness.server.hang()
            return response

        async with informing(silent, sends(added("a", 10)), timings=TIMINGS) as harness:
            play.server = harness.server
            async with asyncio.timeout(PATIENCE):
                await harness.informer.synced.wait()
            fall_silent(harness)
            assert await harness.next() == ("add", "a", False)
            assert harness.queries[:2] == ["list", "9"]
            assert ("interrupted", "pods", "Silent", False) in harness.observed.calls

    async def test_a_quiet_watch_is_not_dead(self) -> None:
        """A kind without changes is silent for 100 s. Each new watch resets the silence."""
        is_open, again = asyncio.Event(), asyncio.Event()

        async def quiet(request: web.BaseRequest) -> web.StreamResponse:
            harness.clock.now += 100
            response = await streamed(request)
            is_open.set()
            await harness.server.hang()
            return response

        async def opened_again(request: web.BaseRequest) -> web.StreamResponse:
            again.set()
            return await streamed(request, added("a", 10))

        steps = (sends(bookmark(9, end=True)), quiet, opened_again)
        async with informing(*steps, timings=TIMINGS) as harness:
            with structlog.testing.capture_logs() as lines:
                async with asyncio.timeout(PATIENCE):
                    await is_open.wait()
                    while harness.informer.silence():  # noqa: ASYNC110 it has no such event
                        await asyncio.sleep(0)
                    fall_silent(harness)
                    await again.wait()
            assert harness.informer.silence() == 0
            assert ("interrupted", "pods", "Silent", False) in harness.observed.calls
            assert [(line["log_level"], line["reason"]) for line in lines] == [("debug", "Silent")]

    async def test_410_retried_at_the_same_version(self) -> None:
        first = sends(added("a", 5), bookmark(9, end=True), error(410, "Expired"))
        again = sends(added("a", 5), bookmark(20, end=True))
        expired = refuses(410, "Expired")
        async with informing(first, again, expired, again) as harness:
            assert [await harness.next() for _ in range(3)] == [
                ("add", "a", True),
                ("update", "a", True),
                ("update", "a", True),
            ]
            assert harness.queries[:4] == ["list", "list", "20", "list"]

    async def test_relist_that_reports_no_deletions(self) -> None:
        first = sends(added("gone", 5), added("a", 6), bookmark(9, end=True), error(410, "Gone"))
        again = sends(added("a", 6), added("new", 11), bookmark(20, end=True))
        async with informing(first, again) as harness:
            changes = [await harness.next() for _ in range(5)]
            assert changes[2:] == [
                ("delete", "gone", True),
                ("update", "a", True),
                ("add", "new", True),
            ]

    async def test_hot_loop_on_410(self) -> None:
        expired = sends(bookmark(9, end=True), error(410, "Expired"))
        async with informing(*[expired] * 13) as harness:
            async with asyncio.timeout(PATIENCE):
                for _ in range(12):
                    await harness.clock.sleeps.get()
            assert harness.clock.slept[:8] == [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
            assert len(harness.server.requests) == 12

    async def test_reconnect_during_the_initial_events(self) -> None:
        torn = breaks(added("newest", 99), added("old", 3))
        async with informing(torn, gives(page([pod("old", 3)], 100))) as harness:
            assert await harness.next() == ("add", "old", True)
            assert harness.queries[:2] == ["list", "page"]
            assert len(harness.informer.store) == 1

    async def test_truncated_last_line(self) -> None:
        first = sends(bookmark(9, end=True), added("a", 10), added("b", 11)[:-30])
        async with informing(first, sends(added("b", 11))) as harness:
            assert await harness.next() == ("add", "a", False)
            assert await harness.next() == ("add", "b", False)
            assert harness.queries[:2] == ["list", "10"]

    async def test_lines_over_the_limit(self) -> None:
        large = frame("ADDED", pod("large", 10, spec={"x": "y" * 5 * 2**20}))
        huge = frame("ADDED", pod("huge", 11, spec={"x": "y" * 17 * 2**20}))
        async with informing(sends(bookmark(9, end=True), large, huge, added("a", 12))) as harness:
            assert await harness.next() == ("add", "large", False)
            assert await harness.next() == ("add", "a", False)
            assert ("faulted", "pods") in harness.observed.calls

    async def test_error_in_the_stream_that_ends_the_watcher(self) -> None:
        first = sends(bookmark(9, end=True), error(500, "InternalError", "etcd is away"))
        async with informing(first, sends(added("a", 10), bookmark(11, end=True))) as harness:
            assert await harness.next() == ("add", "a", True)
            assert ("interrupted", "pods", "ServerError", True) in harness.observed.calls

    async def test_token_expiry(self) -> None:
        async def authorized(request: web.BaseRequest) -> web.StreamResponse:
            if request.headers["Authorization"] != "Bearer new":
                return await refuses(401, "Unauthorized")(request)
            return await streamed(request, added("a", 10))

        token = Token("Bearer old", renewed="Bearer new")
        first = sends(bookmark(9, end=True))
        async with informing(first, authorized, authorized, token=token) as harness:
            assert await harness.next() == ("add", "a", False)
            assert harness.queries[:3] == ["list", "9", "9"]
            assert harness.clock.slept == []

    async def test_one_bad_object_that_stops_the_kind(self) -> None:
        bad = frame("ADDED", pod("bad", 5, status=4))
        first = sends(bad, added("a", 6), bookmark(9, end=True), bad, added("b", 10))
        async with informing(first) as harness:
            assert await harness.next() == ("add", "a", True)
            assert await harness.next() == ("add", "b", False)
            assert harness.observed.calls.count(("faulted", "pods")) == 2

    async def test_bad_object_taken_for_a_deleted_one(self) -> None:
        first = sends(added("a", 5), bookmark(9, end=True), error(410, "Expired"))
        bad = frame("ADDED", pod("a", 6, status=4))
        again = sends(bad, added("b", 10), bookmark(20, end=True))
        async with informing(first, again) as harness:
            assert await harness.next() == ("add", "a", True)
            assert await harness.next() == ("add", "b", True)
            assert harness.informer.store.get("team-a", "a") is not None

    async def test_event_loop_blocked_by_a_list(self) -> None:
        count = 5000
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        lines = [added(f"p{number}", number + 1) for number in range(count)]
        task = asyncio.create_task(others())
        async with informing(sends(*lines, bookmark(count, end=True))) as harness:
            assert await harness.next() == ("add", "p0", True)
            at_first = turns
            for _ in range(count - 1):
                await harness.next()
            assert turns - at_first >= count // 500 - 1
        task.cancel()
