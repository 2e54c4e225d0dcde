"""The state machine of list and watch, state by state."""

import pytest

from frames import bookmark, error, frame, page, pod
from torchrun_api.kinds.resources import PODS
from torchrun_controller.watch import (
    Bookmarked,
    Deleted,
    Faulted,
    FetchPage,
    Interrupted,
    OpenStream,
    StreamFailure,
    Synced,
    Upserted,
    Watcher,
    WatchPause,
    WatchState,
)
from unit.watch.watchers import (
    EXPIRED,
    SILENT,
    UNREACHED,
    interrupted,
    listing,
    names,
    query,
    streaming,
    to_the_stream,
    watcher,
    watching,
)


class TestStreamListing:
    def test_follows_where_a_list_is_long(self) -> None:
        fresh = streaming()
        fresh.next(0)
        fresh.record_open(0)
        fresh.receive(frame("ADDED", pod("a", 5)), 0)
        (synced,) = fresh.receive(bookmark(9, end=True), 0)
        assert names(synced) == ["a"]

    def test_asks_for_a_consistent_list(self) -> None:
        action = streaming().next(0)
        assert action == OpenStream(
            {
                "watch": "true",
                "allowWatchBookmarks": "true",
                "timeoutSeconds": "300",
                "sendInitialEvents": "true",
                "resourceVersionMatch": "NotOlderThan",
            },
            silence=90.0,
            total=330.0,
        )

    def test_timeout_is_spread_up_to_twice(self) -> None:
        assert query(streaming(random=0.999))["timeoutSeconds"] == "599"

    def test_selector_goes_with_every_request(self) -> None:
        fresh = Watcher(PODS, lambda: 0.0, label_selector="a=b", field_selector="c=d")
        selectors = {"labelSelector": "a=b", "fieldSelector": "c=d"}
        assert query(fresh) == {**selectors, "limit": "500"}
        assert selectors.items() <= query(to_the_stream(fresh)).items()

    def test_emits_nothing_before_the_end_of_the_list(self) -> None:
        fresh = streaming()
        fresh.next(0)
        fresh.record_open(0)
        assert fresh.receive(frame("ADDED", pod("a", 5)) + frame("ADDED", pod("b", 3)), 0) == []
        (synced,) = fresh.receive(bookmark(9, end=True), 0)
        assert isinstance(synced, Synced)
        assert (names(synced), synced.resource_version) == (["a", "b"], 9)
        assert fresh.state is WatchState.WATCHING

    def test_includes_changes_during_the_list(self) -> None:
        fresh = streaming()
        fresh.next(0)
        fresh.record_open(0)
        fresh.receive(frame("ADDED", pod("a", 5)) + frame("ADDED", pod("b", 3)), 0)
        fresh.receive(frame("MODIFIED", pod("a", 11, attempt="1")), 0)
        fresh.receive(frame("DELETED", pod("b", 12)) + frame("DELETED", pod("none", 12)), 0)
        (synced,) = fresh.receive(bookmark(12, end=True), 0)
        assert isinstance(synced, Synced)
        assert [obj.metadata.labels.attempt for obj in synced.objects] == ["1"]

    def test_watches_on_the_same_stream(self) -> None:
        fresh = streaming()
        fresh.next(0)
        fresh.record_open(0)
        synced, upserted = fresh.receive(bookmark(9, end=True) + frame("ADDED", pod("a", 10)), 0)
        assert isinstance(synced, Synced)
        assert isinstance(upserted, Upserted)

    def test_lists_unreadable_objects_separately(self) -> None:
        fresh = streaming()
        fresh.next(0)
        fresh.record_open(0)
        bad = [frame("ADDED", pod(name, 3, status=4)) for name in ("a", "b", "c")]
        faults = fresh.receive(b"".join(bad), 0)
        assert all(isinstance(fault, Faulted) for fault in faults)
        fresh.receive(frame("MODIFIED", pod("b", 5)) + frame("DELETED", pod("c", 6)), 0)
        (synced,) = fresh.receive(bookmark(9, end=True), 0)
        assert isinstance(synced, Synced)
        assert synced.unreadable == {("team-a", "a")}

    @pytest.mark.parametrize("status", [400, 422, 501])
    def test_refused_by_an_old_server_falls_back_to_pages_permanently(self, status: int) -> None:
        fresh = streaming()
        fresh.next(0)
        assert fresh.failed(StreamFailure("forbidden", status), 0) == []
        assert fresh.next(0) == FetchPage({"limit": "500"}, 60.0)
        fresh.failed(UNREACHED, 0)
        for number in range(9):
            assert isinstance(fresh.next(60), FetchPage)
            assert fresh.page(page([pod("a", 3)], 9, token=f"t{number}"), 60) == []

    def test_ignored_by_a_very_old_server_falls_back_to_pages(self) -> None:
        fresh = streaming()
        fresh.next(0)
        fresh.record_open(0)
        events = fresh.receive(frame("ADDED", pod("a", 5)) + bookmark(9), 0)
        assert interrupted(events).delay == 0
        assert isinstance(fresh.next(0), FetchPage)

    @pytest.mark.parametrize("how", ["closed", "broken"])
    def test_an_unfinished_stream_is_followed_by_pages_once(self, how: str) -> None:
        fresh = streaming()
        fresh.next(0)
        fresh.record_open(0)
        fresh.receive(frame("ADDED", pod("a", 5)), 0)
        event = interrupted(fresh.closed(50) if how == "closed" else fresh.failed(UNREACHED, 50))
        assert event.relist
        for number in range(9):
            assert isinstance(fresh.next(60), FetchPage)
            assert fresh.page(page([pod("b", 4)], 6, token=f"t{number}"), 60) == []
        assert names(fresh.page(page([], 6), 60)[0]) == ["b"]
        query(fresh, 60)
        fresh.failed(EXPIRED, 60)
        to_the_stream(fresh, 100)

    def test_an_unreachable_server_is_retried(self) -> None:
        fresh = streaming()
        fresh.next(0)
        assert interrupted(fresh.failed(UNREACHED, 0)).relist
        assert "sendInitialEvents" in query(to_the_stream(fresh, 60), 60)


class TestListing:
    def test_a_short_list_needs_one_page(self) -> None:
        fresh = watcher()
        assert fresh.next(0) == FetchPage({"limit": "500"}, 60.0)
        for number in range(3):
            assert fresh.page(page([pod(f"a-{number}", 3)], 9, token="t"), 0) == []
        (synced,) = fresh.page(page([pod("a-3", 4)], 9), 0)
        assert names(synced) == ["a-0", "a-1", "a-2", "a-3"]
        assert fresh.state is WatchState.WATCHING

    def test_pages_of_500(self) -> None:
        fresh = listing()
        assert fresh.next(0) == FetchPage({"limit": "500"}, 60.0)
        assert fresh.page(page([pod("a", 3)], 9, token="t1"), 0) == []
        assert query(fresh) == {"limit": "500", "continue": "t1"}
        (synced,) = fresh.page(page([pod("b", 4)], 9), 0)
        assert names(synced) == ["a", "b"]
        assert query(fresh)["resourceVersion"] == "9"

    def test_expired_on_a_later_page_is_one_list_without_pages(self) -> None:
        fresh = listing()
        fresh.page(page([pod("a", 3)], 9, token="t1"), 0)
        assert fresh.failed(EXPIRED, 0) == []
        assert query(fresh) == {}
        (synced,) = fresh.page(page([pod("b", 4)], 12), 0)
        assert names(synced) == ["b"]

    def test_expired_without_pages_backs_off(self) -> None:
        fresh = listing()
        fresh.page(page([], 9, token="t1"), 0)
        fresh.failed(EXPIRED, 0)
        assert interrupted(fresh.failed(EXPIRED, 0)).delay >= 0.8
        assert query(fresh, 60) == {"limit": "500"}

    def test_a_failure_restarts_the_list(self) -> None:
        fresh = listing()
        fresh.page(page([pod("a", 3)], 9, token="t1"), 0)
        assert interrupted(fresh.failed(UNREACHED, 0)).relist
        assert query(fresh, 60) == {"limit": "500"}
        (synced,) = fresh.page(page([pod("b", 4)], 9), 60)
        assert names(synced) == ["b"]

    def test_an_invalid_page_backs_off(self) -> None:
        event = interrupted(listing().page(b"<html>Please log in</html>", 0))
        assert (event.reason, event.relist) == ("NotAList", True)
        assert "the answer to a list of pods is not a Kubernetes list" in event.message

    def test_an_unreadable_object_is_reported_and_known_to_exist(self) -> None:
        fresh = listing()
        (fault,) = fresh.page(page([pod("a", 3, status=4)], 9, token="t1"), 0)
        assert isinstance(fault, Faulted)
        (synced,) = fresh.page(page([], 9), 0)
        assert isinstance(synced, Synced)
        assert synced.unreadable == {("team-a", "a")}


class TestWatching:
    def test_events(self) -> None:
        events = watching().receive(
            frame("ADDED", pod("a", 11)) + bookmark(12) + frame("DELETED", pod("a", 13)), 1
        )
        assert isinstance(events[0], Upserted)
        assert events[1:] == [Bookmarked(12), Deleted(("team-a", "a"), 13)]

    def test_a_clean_end_resumes_from_the_last_version(self) -> None:
        watch = watching()
        watch.receive(frame("ADDED", pod("a", 11)) + bookmark(15), 1)
        assert watch.closed(300) == []
        assert query(watch, 300) == {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": "300",
            "resourceVersion": "15",
        }

    def test_a_broken_connection_resumes_from_the_last_version_at_once(self) -> None:
        watch = watching()
        event = interrupted(watch.failed(UNREACHED, 300))
        assert (event.reason, event.delay, event.relist) == ("Broken", 0, False)
        assert query(watch, 300)["resourceVersion"] == "10"

    def test_silence_is_reported_and_resumes_at_once(self) -> None:
        watch = watching()
        event = interrupted(watch.failed(SILENT, 300))
        assert (event.reason, event.delay, event.relist) == (Interrupted.SILENT, 0, False)
        assert query(watch, 300)["resourceVersion"] == "10"

    def test_a_silent_stream_interrupts_its_list(self) -> None:
        watch = streaming()
        watch.next(0)
        watch.record_open(0)
        event = interrupted(watch.failed(SILENT, 300))
        assert (event.reason, event.relist) == ("Broken", True)
        assert event.delay > 0

    def test_a_short_watch_without_events_is_an_error(self) -> None:
        watch = watching()
        watch.closed(300)
        watch.next(300)
        watch.record_open(300)
        assert interrupted(watch.closed(300.9)).relist

    def test_a_short_watch_with_an_event_waits_and_resumes(self) -> None:
        watch = watching()
        watch.receive(frame("ADDED", pod("a", 11)), 0.5)
        event = interrupted(watch.closed(0.9))
        assert (event.delay, event.relist) == (0.8, False)
        assert query(watch, 60)["resourceVersion"] == "11"

    @pytest.mark.parametrize(
        ("failure", "reason"),
        [(UNREACHED, "Unreached"), (StreamFailure("busy", 429), "Throttled")],
    )
    def test_a_busy_or_unreachable_server_gets_the_same_request_again(
        self, failure: StreamFailure, reason: str
    ) -> None:
        watch = watching()
        watch.closed(300)
        watch.next(300)
        event = interrupted(watch.failed(failure, 300))
        assert (event.reason, event.delay, event.relist) == (reason, 0.8, False)
        assert watch.next(300.5) == WatchPause(pytest.approx(0.3))
        assert query(watch, 301)["resourceVersion"] == "10"

    @pytest.mark.parametrize(
        ("status", "reason"), [(403, "Forbidden"), (410, "Expired"), (500, "Refused")]
    )
    def test_any_other_refusal_starts_a_new_list(self, status: int, reason: str) -> None:
        watch = watching()
        watch.closed(300)
        watch.next(300)
        event = interrupted(watch.failed(StreamFailure("no", status), 300))
        assert (event.reason, event.delay, event.relist) == (reason, 0.8, True)
        assert "resourceVersion" not in query(watch, 301)

    def test_retry_after_is_honoured_up_to_a_limit(self) -> None:
        for asked, got in ((7.0, 7.0), (0.1, 0.8), (86400.0, 60.0)):
            watch = watching()
            watch.closed(300)
            watch.next(300)
            assert interrupted(watch.failed(StreamFailure("busy", 429, asked), 300)).delay == got

    def test_retry_after_of_an_error_event_is_honoured(self) -> None:
        events = watching().receive(error(429, "TooManyRequests", "busy", 5), 1)
        assert interrupted(events).delay == 5.0


class TestBackoff:
    def test_doubles_up_to_a_cap(self) -> None:
        fresh, now, delays = watcher(), 0.0, []
        for _ in range(8):
            fresh.next(now)
            delays.append(interrupted(fresh.failed(UNREACHED, now)).delay)
            now += delays[-1]
        assert delays == [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]

    def test_jitter_is_up_to_twice(self) -> None:
        fresh = watcher(random=0.5)
        fresh.next(0)
        assert interrupted(fresh.failed(UNREACHED, 0)).delay == pytest.approx(1.2)

    @pytest.mark.parametrize(("lasted", "delay"), [(29.0, 1.6), (31.0, 0.8)])
    def test_resets_after_a_long_watch(self, lasted: float, delay: float) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.failed(UNREACHED, 0)
        fresh.next(5)
        fresh.record_open(5)
        fresh.receive(bookmark(10, end=True), 5)
        assert interrupted(fresh.failed(UNREACHED, 5 + lasted)).delay == 0
        fresh.next(5 + lasted)
        assert interrupted(fresh.failed(UNREACHED, 5 + lasted)).delay == delay

    def test_a_watch_resumes_soon_after_a_long_outage(self) -> None:
        watch, now, delays = watching(), 100.0, []
        watch.failed(UNREACHED, now)
        for _ in range(8):
            watch.next(now)
            delays.append(interrupted(watch.failed(UNREACHED, now)).delay)
            now += delays[-1]
        assert delays == [0.8, 1.6, 3.2, 6.4, 8.0, 8.0, 8.0, 8.0]
        watch.next(now)
        assert interrupted(watch.failed(EXPIRED, now)).delay == 0.8

    def test_time_without_a_watch_does_not_reset_the_backoff(self) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.failed(UNREACHED, 0)
        fresh.next(500)
        assert interrupted(fresh.failed(UNREACHED, 500)).delay == 1.6

    def test_short_outages_once_a_minute_do_not_add_up(self) -> None:
        fresh, now, longest = watcher(), 0.0, 0.0
        fresh.next(now)
        fresh.record_open(now)
        fresh.receive(bookmark(10, end=True), now)
        for _ in range(20):
            now += 60
            back = now + 8
            delay = interrupted(fresh.failed(UNREACHED, now)).delay
            while now + delay < back:
                now += delay
                fresh.next(now)
                delay = interrupted(fresh.failed(UNREACHED, now)).delay
            now += delay
            longest = max(longest, now - back)
            fresh.next(now)
            fresh.record_open(now)
        assert longest < 8
