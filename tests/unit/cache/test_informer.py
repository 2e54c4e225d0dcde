"""The informer against a real HTTP server with faults."""

import asyncio
from random import random
from typing import NoReturn, cast

import pytest
from aiohttp import web

from frames import bookmark, error, frame, page, pod
from garbled import GARBLED
from informing import PATIENCE, Play, added, breaks, gives, informing, refuses, running, sends
from scripted_server import connection, serving, streamed
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.meta import ChildMeta
from torchrun_api.kinds.resources import PODS
from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Disconnected, Transport
from torchrun_controller.watch import Synced, Timings, Upserted, Watcher
from torchrun_controller.watch.codec import Codec


class TestFollowing:
    async def test_list_then_watch_on_one_stream(self) -> None:
        first = sends(added("a", 5), bookmark(9, end=True), frame("MODIFIED", pod("a", 10)))
        async with informing(first) as harness:
            assert await harness.next() == ("add", "a", True)
            assert await harness.next() == ("update", "a", False)
            assert harness.informer.synced.is_set()
            assert harness.informer.store.resource_version == 10
            assert harness.observed.calls[:2] == [("synced", "pods", 1), ("changed", "pods")]

    async def test_a_clean_end_resumes_without_a_list(self) -> None:
        first = sends(bookmark(9, end=True), added("a", 10), bookmark(12))
        then = sends(frame("DELETED", pod("a", 13)), frame("DELETED", pod("none", 14)))
        async with informing(first, then) as harness:
            assert await harness.next() == ("add", "a", False)
            assert await harness.next() == ("delete", "a", False)
            assert harness.queries[:2] == ["list", "12"]
            assert harness.clock.slept == []
            assert await harness.informer.wait_for(14, PATIENCE)

    async def test_requests_have_selector_and_namespace(self) -> None:
        async with informing(
            sends(bookmark(9, end=True)), label_selector="a=b", namespace="team-a"
        ) as harness:
            await harness.informer.synced.wait()
            (first_request, *_) = harness.server.requests
            assert first_request.startswith(
                "GET /api/v1/namespaces/team-a/pods?labelSelector=a%3Db&"
            )

    async def test_a_short_list_is_plain_before_the_watch(self) -> None:
        pages = gives(page([pod("a", 5)], 9, token="more")), gives(page([pod("b", 6)], 9))
        watch = sends(frame("MODIFIED", pod("a", 10)))
        async with informing(*pages, watch, plain_pages=2) as harness:
            changes = [await harness.next() for _ in range(3)]
            assert changes == [("add", "a", True), ("add", "b", True), ("update", "a", False)]
            assert harness.queries[:3] == ["page", "page", "9"]

    async def test_a_long_list_is_streamed(self) -> None:
        long = gives(page([pod("a", 5)], 9, token="more"))
        stream = sends(added("a", 5), added("b", 6), bookmark(9, end=True))
        async with informing(long, stream, plain_pages=1) as harness:
            assert [await harness.next() for _ in range(2)] == [
                ("add", "a", True),
                ("add", "b", True),
            ]
            assert harness.queries[:2] == ["page", "list"]

    async def test_pages_where_lists_cannot_be_streamed(self) -> None:
        async with informing(
            refuses(422, "Invalid"),
            gives(page([pod("a", 5)], 9, token="more")),
            refuses(410, "Expired"),
            gives(page([pod("b", 6)], 11)),
        ) as harness:
            assert await harness.next() == ("add", "b", True)
            limited, further, whole = harness.server.requests[1:4]
            assert limited == "GET /api/v1/pods?limit=500"
            assert further == "GET /api/v1/pods?limit=500&continue=more"
            assert whole == "GET /api/v1/pods"
            assert harness.clock.slept == []

    async def test_the_newest_version_can_be_on_any_page(self) -> None:
        pages = [page([pod("a", 5), pod("b", 17)], 40, token="more"), page([pod("c", 6)], 40)]

        async def listed(request: web.BaseRequest) -> web.Response:
            assert "PartialObjectMetadataList" in request.headers["Accept"]
            return web.Response(body=pages["continue" in request.query])

        async with (
            serving(listed) as server,
            connection(server.url).session("watch") as transport,
        ):
            informer = Informer(
                Watcher(PODS, random), transport, Store(), lambda change, initial: None
            )
            assert await informer.newest() == 17
            pages[:] = [
                b'{"metadata":{"resourceVersion":"40"},"items":null}'
            ]  # as it is, where empty
            assert await informer.newest() == 0
            # API servers write an empty metadata list like this.
            pages[:] = [b'{"metadata": {"resourceVersion": "40"}, "items": null}']
            assert await informer.newest() == 0
        assert "resourceVersion" not in "".join(server.requests), "a consistent read from etcd"

    @pytest.mark.parametrize("body", GARBLED)
    async def test_garbage_has_no_newest_version(self, body: bytes) -> None:
        async def listed(request: web.BaseRequest) -> web.Response:
            return web.Response(body=body)

        async with (
            serving(listed) as server,
            connection(server.url).session("watch") as transport,
        ):
            informer = Informer(
                Watcher(PODS, random), transport, Store(), lambda change, initial: None
            )
            with pytest.raises(Disconnected, match="unexpected response"):
                await informer.newest()

    async def test_a_watch_that_stays_open_after_its_error_is_replaced(self) -> None:
        replaced = asyncio.Event()

        async def stays_open(request: web.BaseRequest) -> web.StreamResponse:
            chunks = added("a", 5), bookmark(9, end=True), error(500, "InternalError")
            response = await streamed(request, *chunks)
            await replaced.wait()
            return response

        listed = sends(added("a", 10), bookmark(11, end=True))
        async with informing(stays_open, listed) as harness:
            assert await harness.next() == ("add", "a", True)
            async with asyncio.timeout(60):
                assert (await harness.next())[:2] == ("update", "a")
            assert harness.queries[:2] == ["list", "list"]
            replaced.set()

    async def test_last_seen_is_the_time_of_the_last_data(self) -> None:
        first = sends(added("a", 5), bookmark(9, end=True), error(500, "InternalError"))
        async with informing(first, refuses(500, "InternalError")) as harness:
            await harness.next()
            async with asyncio.timeout(PATIENCE):
                await harness.clock.sleeps.get()
                await harness.clock.sleeps.get()
            assert harness.informer.last_seen == 1000.0
            assert harness.clock.now > 1000.0


class TestLiveness:
    """An outage of the API server must not restart the process; a hanging informer must."""

    async def silent_for(self, seconds: float, transport: object) -> tuple[float, float]:
        """The longest silence of the server, and the longest idle time of the informer."""
        now = 0.0

        async def sleep(wait: float) -> None:
            nonlocal now
            idle.append(informer.idle())
            now += wait
            await asyncio.sleep(0)

        idle: list[float] = []
        informer = Informer(
            Watcher(PODS, random),
            cast("Transport", transport),
            Store(),
            lambda change, initial: None,
            clock=lambda: now,
            sleep=sleep,
        )
        task = asyncio.create_task(informer.run())
        while now < seconds:  # noqa: ASYNC110 its clock is not the loop's
            await asyncio.sleep(0)
        task.cancel()
        return informer.silence(), max(idle)

    async def test_an_outage_is_retried_without_end(self) -> None:
        class Away:
            async def read_list(self, *_: object, **__: object) -> NoReturn:
                raise Disconnected("refused")

            stream = read_list

        silence, idle = await self.silent_for(3600, Away())
        assert silence > 3600
        assert idle < 100

    async def test_a_hanging_informer_is_idle(self) -> None:
        now = 0.0

        class Hangs:
            async def read_list(self, *_: object, **__: object) -> NoReturn:
                await asyncio.Event().wait()
                raise AssertionError

        informer = Informer(
            Watcher(PODS, random),
            cast("Transport", Hangs()),
            Store(),
            lambda change, initial: None,
            clock=lambda: now,
        )
        task = asyncio.create_task(informer.run())
        await asyncio.sleep(0)
        now = 700.0
        assert informer.idle() == 700
        task.cancel()


class TestMisbehavingServer:
    async def test_retry_after_is_honoured(self) -> None:
        busy = refuses(429, "TooManyRequests", **{"Retry-After": "7"})
        first = sends(bookmark(9, end=True))
        async with informing(first, busy, sends(added("a", 10))) as harness:
            assert await harness.next() == ("add", "a", False)
            assert harness.clock.slept == [7.0]
            assert harness.queries[:3] == ["list", "9", "9"]

    async def test_500_starts_a_new_list_after_a_delay(self) -> None:
        first, again = sends(bookmark(9, end=True)), sends(added("a", 5), bookmark(12, end=True))
        async with informing(first, refuses(500, "InternalError"), again) as harness:
            assert await harness.next() == ("add", "a", True)
            assert harness.clock.slept == [0.8]
            assert harness.queries[:3] == ["list", "9", "list"]
            assert ("interrupted", "pods", "Refused", True) in harness.observed.calls

    async def test_a_login_page_instead_of_a_list(self) -> None:
        async with informing(
            refuses(422, "Invalid"),
            gives(b"<html>Please log in</html>"),
            gives(page([pod("a", 5)], 9)[:-7]),
            gives(page([pod("a", 5)], 9)),
        ) as harness:
            assert await harness.next() == ("add", "a", True)
            assert harness.clock.slept == [0.8, 1.6]

    async def test_a_login_page_instead_of_a_watch(self) -> None:
        login = sends(b"<html>\nPlease log in\n</html>\n")
        async with informing(login, gives(page([pod("a", 5)], 9))) as harness:
            assert await harness.next() == ("add", "a", True)
            assert harness.observed.calls.count(("faulted", "pods")) == 3

    async def test_a_watch_resumes_after_the_server_went_away(self) -> None:
        first = sends(bookmark(9, end=True))
        async with informing(first, breaks(), breaks(), sends(added("a", 10))) as harness:
            assert await harness.next() == ("add", "a", False)
            assert harness.queries[:4] == ["list", "9", "9", "9"]

    async def test_a_failing_callback_affects_one_object(self) -> None:
        def on_change(change: Change[Pod], initial: bool) -> None:
            if change.object.metadata.name == "a":
                raise ValueError("a bug of ours")
            latest.set_result(change.object.metadata.name)

        latest: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        play = Play(sends(added("a", 5), added("b", 6), bookmark(9, end=True)))
        async with serving(play) as server, connection(server.url).session("x") as transport:
            play.server = server
            informer = Informer(Watcher(PODS, random, plain_pages=0), transport, Store(), on_change)
            async with running(informer), asyncio.timeout(PATIENCE):
                assert await latest == "b"
                await informer.synced.wait()


class TestFirstResult:
    async def test_a_list_that_succeeds(self) -> None:
        async with informing(sends(bookmark(9, end=True))) as harness:
            assert not harness.informer.first_result.is_set()
            async with asyncio.timeout(PATIENCE):
                await harness.informer.first_result.wait()
            assert harness.informer.synced.is_set()

    async def test_a_list_that_is_refused(self) -> None:
        async with informing(refuses(403, "Forbidden")) as harness:
            async with asyncio.timeout(PATIENCE):
                await harness.informer.first_result.wait()
            assert not harness.informer.synced.is_set()

    async def test_a_server_without_streamed_lists_has_not_failed(self) -> None:
        go = asyncio.Event()

        async def pages(request: web.BaseRequest) -> web.StreamResponse:
            go.set()
            await harness.server.hang()
            raise AssertionError

        async with informing(sends(bookmark(9)), pages) as harness:
            await go.wait()
            assert not harness.informer.first_result.is_set()


class TestWaitFor:
    async def test_a_version_that_is_present(self) -> None:
        async with informing(sends(bookmark(9, end=True))) as harness:
            await harness.informer.synced.wait()
            assert await harness.informer.wait_for(9, 0.0)

    async def test_versions_that_arrive_later(self) -> None:
        go = asyncio.Event()

        async def later(request: web.BaseRequest) -> web.StreamResponse:
            response = await streamed(request, bookmark(9, end=True))
            await go.wait()
            await response.write(added("a", 12) + bookmark(13))
            await harness.server.hang()
            return response

        async with informing(later) as harness:
            waits = [
                asyncio.create_task(harness.informer.wait_for(version, PATIENCE))
                for version in (13, 12, 11)
            ]
            await harness.informer.synced.wait()
            go.set()
            assert await asyncio.gather(*waits) == [True, True, True]

    async def test_wait_is_bounded(self) -> None:
        async with informing(sends(bookmark(9, end=True))) as harness:
            assert not await harness.informer.wait_for(99, 0.01)

    async def test_a_waiter_that_timed_out_does_not_block_others(self) -> None:
        first = sends(bookmark(9, end=True))
        go = asyncio.Event()

        async def later(request: web.BaseRequest) -> web.StreamResponse:
            await go.wait()
            return await streamed(request, bookmark(12))

        async with informing(first, later) as harness:
            await harness.informer.synced.wait()
            assert not await harness.informer.wait_for(11, 0.01)
            wait = asyncio.create_task(harness.informer.wait_for(12, PATIENCE))
            go.set()
            assert await wait


async def test_the_observer_is_optional() -> None:
    play = Play(
        sends(added("a", 5), bookmark(9, end=True), frame("MODIFIED", pod("a", 10)), b"?\n"),
        refuses(500, "InternalError"),
        sends(added("b", 11), bookmark(12, end=True)),
    )
    async with serving(play) as server, connection(server.url).session("x") as transport:
        play.server = server
        informer = Informer(
            Watcher(PODS, random, timings=Timings(backoff=0.001, short_lived=0.0), plain_pages=0),
            transport,
            Store(),
            lambda change, initial: None,
        )
        async with running(informer):
            assert await informer.wait_for(12, PATIENCE)
        assert len(informer.store) == 1


async def test_nobody_sees_a_store_without_pods_that_are_not_known_to_have_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchrun_controller.cache.informer._BATCH", 1)
    changes: list[str] = []
    informer = Informer(
        Watcher(PODS, random),
        cast("Transport", None),
        Store(),
        lambda change, initial: changes.append(change.object.metadata.name),
    )
    pods = [Pod(metadata=ChildMeta(namespace="ml", name=name)) for name in ("a", "b", "c")]
    await informer.take([Synced(pods, 5)])
    changes.clear()
    taken = asyncio.create_task(informer.take([Synced(pods[2:], 9)]))
    await asyncio.sleep(0)  # until the informer lets others run
    assert (len(informer.store), changes[:2]) == (1, ["a", "b"])
    await taken


async def test_a_changed_pod_shares_its_annotations_with_its_last_state() -> None:
    changes: list[Change[Pod]] = []
    informer = Informer(
        Watcher(PODS, random),
        cast("Transport", None),
        Store(),
        lambda change, initial: changes.append(change),
    )
    codec = Codec(Pod)
    for kind, name, version in (("ADDED", "a", 5), ("ADDED", "b", 6), ("MODIFIED", "a", 7)):
        body = pod(name, version)
        metadata = body["metadata"]
        assert isinstance(metadata, dict)
        metadata["annotations"] = {"torchrun.ai/commit": f"of {name}"}
        event = codec.frame(frame(kind, body))
        assert isinstance(event, Upserted)
        await informer.take([event])
    old, new = changes[-1].old, changes[-1].new
    assert old is not None
    assert new is not None
    assert old is not new
    assert new.metadata.annotations is old.metadata.annotations
    assert new.metadata.annotations.commit == "of a"
