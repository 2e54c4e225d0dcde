"""Faults of other Python watchers, each by its name."""

import pytest

from frames import bookmark, error, frame, page, pod
from torchrun_controller.watch import (
    Faulted,
    FetchPage,
    Upserted,
    WatchPause,
)
from unit.watch.watchers import (
    UNREACHED,
    interrupted,
    names,
    query,
    streaming,
    watcher,
    watching,
)


class TestKnownFaults:
    def test_410_is_not_retried_at_the_same_version(self) -> None:
        watch = watching()
        event = interrupted(watch.receive(error(410, "Expired"), 5))
        assert (event.reason, event.relist) == ("Expired", True)
        assert "resourceVersion" not in query(watch, 60)

    def test_no_hot_loop_on_410(self) -> None:
        fresh, now, requests = watcher(), 0.0, 0
        while now < 600:
            action = fresh.next(now)
            if isinstance(action, WatchPause):
                now += action.seconds
                continue
            requests += 1
            if isinstance(action, FetchPage):
                fresh.page(page([], 10), now)
                continue
            fresh.record_open(now)
            fresh.receive(error(410, "Expired"), now)
        assert requests <= 60

    def test_watches_that_end_at_once_are_no_hot_loop(self) -> None:
        watch, now, requests = watching(), 0.0, 0
        watch.closed(now)
        while now < 600:
            action = watch.next(now)
            if isinstance(action, WatchPause):
                now += action.seconds
                continue
            requests += 1
            if isinstance(action, FetchPage):
                watch.page(page([], 10), now)
                continue
            watch.record_open(now)
            watch.receive(bookmark(10), now)
            watch.closed(now)
        assert requests <= 30

    def test_reconnect_during_the_initial_events_starts_again(self) -> None:
        fresh = streaming()
        fresh.next(0)
        fresh.record_open(0)
        fresh.receive(frame("ADDED", pod("newest", 99)) + frame("ADDED", pod("old", 3)), 0)
        fresh.failed(UNREACHED, 5)
        assert "resourceVersion" not in query(fresh, 60)
        (synced,) = fresh.page(page([pod("old", 3)], 100), 60)
        assert names(synced) == ["old"]

    def test_a_truncated_last_line_comes_with_the_next_watch(self) -> None:
        watch = watching()
        assert watch.receive(frame("ADDED", pod("a", 11))[:-20], 1) == []
        assert watch.closed(300) == []
        assert query(watch, 300)["resourceVersion"] == "10"
        watch.record_open(300)
        (event,) = watch.receive(frame("ADDED", pod("a", 11)), 301)
        assert isinstance(event, Upserted)

    def test_line_over_the_limit_is_named_and_skipped(self) -> None:
        watch = streaming(max_line=4096)
        watch.next(0)
        watch.record_open(0)
        watch.receive(bookmark(10, end=True), 0)
        huge = frame("ADDED", pod("huge", 11, spec={"x": "y" * 5000}))
        fault, event = watch.receive(huge + frame("ADDED", pod("a", 12)), 1)
        assert isinstance(fault, Faulted)
        assert fault.key == ("team-a", "huge")
        assert "4096 bytes" in fault.message
        assert isinstance(event, Upserted)

    @pytest.mark.parametrize("code", [403, 410, 429, 500, 504])
    def test_error_in_the_stream_does_not_end_the_watcher(self, code: int) -> None:
        watch = watching()
        event = interrupted(watch.receive(error(code, "Any") + frame("ADDED", pod("a", 11)), 5))
        assert (event.delay, event.relist) == (0.8, True)
        assert isinstance(watch.next(5), WatchPause)
        assert query(watch, 60) == {"limit": "500"}  # starts a new list

    def test_one_bad_object_does_not_stop_its_kind(self) -> None:
        events = watching().receive(
            frame("ADDED", pod("bad", 11, status=4)) + frame("ADDED", pod("good", 12)), 1
        )
        assert [type(event) for event in events] == [Faulted, Upserted]

    def test_garbage_does_not_reset_the_backoff(self) -> None:
        watch = watching()
        watch.closed(300)
        watch.next(300)
        watch.record_open(300)
        assert isinstance(watch.receive(b"<html>\n", 300)[0], Faulted)
        assert interrupted(watch.closed(300.1)).relist
