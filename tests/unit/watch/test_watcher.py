"""The state machine, state by state, and the known faults of Python watchers by name."""

import pytest

from frames import bookmark, error, frame, page, pod
from torchrun_api.core import Pod
from torchrun_api.kinds import PODS
from torchrun_controller.watch import (
    Bookmarked,
    Deleted,
    Event,
    Failure,
    Faulted,
    FetchPage,
    Interrupted,
    OpenStream,
    State,
    Synced,
    Upserted,
    Wait,
    Watcher,
)

EXPIRED = Failure("too old", 410)
UNREACHED = Failure("connection refused")


def watcher(random: float = 0.0, max_line: int = 2**20) -> Watcher[Pod]:
    return Watcher(PODS, lambda: random, max_line=max_line)


def listing() -> Watcher[Pod]:
    """At its first page, after the server refused to stream a list."""
    fresh = watcher()
    fresh.next(0)
    assert fresh.failed(Failure("sendInitialEvents is forbidden", 422), 0) == []
    return fresh


def watching(version: int = 10) -> Watcher[Pod]:
    """On an open watch, opened at 0, whose list has just come in."""
    fresh = watcher()
    fresh.next(0)
    fresh.opened(0)
    fresh.receive(bookmark(version, end=True), 0)
    assert fresh.state is State.WATCHING
    return fresh


def names(event: Event[Pod]) -> list[str]:
    assert isinstance(event, Synced)
    return [obj.metadata.name for obj in event.objects]


def query(watch: Watcher[Pod], now: float = 0.0) -> dict[str, str]:
    action = watch.next(now)
    assert not isinstance(action, Wait)
    return dict(action.query)


def interrupted(events: list[Event[Pod]]) -> Interrupted:
    (event,) = events
    assert isinstance(event, Interrupted)
    return event


class TestStreamListing:
    def test_asks_for_a_consistent_list(self) -> None:
        action = watcher().next(0)
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
        assert query(watcher(random=0.999))["timeoutSeconds"] == "599"

    def test_selector_goes_with_every_request(self) -> None:
        fresh = Watcher(PODS, lambda: 0.0, label_selector="a=b", field_selector="c=d")
        assert query(fresh)["labelSelector"] == "a=b"
        fresh.failed(Failure("no", 422), 0)
        selectors = {"labelSelector": "a=b", "fieldSelector": "c=d"}
        assert query(fresh) == {**selectors, "limit": "500"}

    def test_hands_nothing_on_before_the_end(self) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.opened(0)
        assert fresh.receive(frame("ADDED", pod("a", 5)) + frame("ADDED", pod("b", 3)), 0) == []
        (synced,) = fresh.receive(bookmark(9, end=True), 0)
        assert isinstance(synced, Synced)
        assert (names(synced), synced.resource_version) == (["a", "b"], 9)
        assert fresh.state is State.WATCHING

    def test_takes_in_what_happens_meanwhile(self) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.opened(0)
        fresh.receive(frame("ADDED", pod("a", 5)) + frame("ADDED", pod("b", 3)), 0)
        fresh.receive(frame("MODIFIED", pod("a", 11, attempt="1")), 0)
        fresh.receive(frame("DELETED", pod("b", 12)) + frame("DELETED", pod("none", 12)), 0)
        (synced,) = fresh.receive(bookmark(12, end=True), 0)
        assert isinstance(synced, Synced)
        assert [obj.metadata.labels.attempt for obj in synced.objects] == ["1"]

    def test_goes_on_watching_the_same_stream(self) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.opened(0)
        synced, upserted = fresh.receive(bookmark(9, end=True) + frame("ADDED", pod("a", 10)), 0)
        assert isinstance(synced, Synced)
        assert isinstance(upserted, Upserted)

    def test_keeps_apart_what_exists_and_cannot_be_read(self) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.opened(0)
        bad = [frame("ADDED", pod(name, 3, status=4)) for name in ("a", "b", "c")]
        faults = fresh.receive(b"".join(bad), 0)
        assert all(isinstance(fault, Faulted) for fault in faults)
        fresh.receive(frame("MODIFIED", pod("b", 5)) + frame("DELETED", pod("c", 6)), 0)
        (synced,) = fresh.receive(bookmark(9, end=True), 0)
        assert isinstance(synced, Synced)
        assert synced.unreadable == {("team-a", "a")}

    @pytest.mark.parametrize("status", [400, 422, 501])
    def test_refused_by_an_old_server_falls_back_to_pages_for_good(self, status: int) -> None:
        fresh = watcher()
        fresh.next(0)
        assert fresh.failed(Failure("forbidden", status), 0) == []
        assert fresh.next(0) == FetchPage({"limit": "500"}, 60.0)
        fresh.failed(UNREACHED, 0)
        assert isinstance(fresh.next(60), FetchPage)

    def test_ignored_by_a_very_old_server_falls_back_to_pages(self) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.opened(0)
        events = fresh.receive(frame("ADDED", pod("a", 5)) + bookmark(9), 0)
        assert interrupted(events).delay == 0
        assert isinstance(fresh.next(0), FetchPage)

    @pytest.mark.parametrize("how", ["closed", "broken"])
    def test_that_does_not_end_is_followed_by_pages_once(self, how: str) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.opened(0)
        fresh.receive(frame("ADDED", pod("a", 5)), 0)
        event = interrupted(fresh.closed(50) if how == "closed" else fresh.failed(UNREACHED, 50))
        assert event.relist
        assert isinstance(fresh.next(60), FetchPage)
        assert names(fresh.page(page([pod("b", 4)], 6), 60)[0]) == ["b"]
        query(fresh, 60)
        fresh.failed(EXPIRED, 60)
        assert "sendInitialEvents" in query(fresh, 100)

    def test_not_reached_is_tried_again(self) -> None:
        fresh = watcher()
        fresh.next(0)
        assert interrupted(fresh.failed(UNREACHED, 0)).relist
        assert "sendInitialEvents" in query(fresh, 60)


class TestListing:
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

    def test_a_failure_begins_the_list_anew(self) -> None:
        fresh = listing()
        fresh.page(page([pod("a", 3)], 9, token="t1"), 0)
        assert interrupted(fresh.failed(UNREACHED, 0)).relist
        assert query(fresh, 60) == {"limit": "500"}
        (synced,) = fresh.page(page([pod("b", 4)], 9), 60)
        assert names(synced) == ["b"]

    def test_a_page_that_is_no_list_backs_off(self) -> None:
        event = interrupted(listing().page(b"<html>Please log in</html>", 0))
        assert (event.reason, event.relist) == ("NotAList", True)
        assert "the answer to a list of pods is not a Kubernetes list" in event.message

    def test_a_bad_object_is_reported_on_its_page_and_known_to_exist(self) -> None:
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

    def test_clean_end_goes_on_from_the_last_version(self) -> None:
        watch = watching()
        watch.receive(frame("ADDED", pod("a", 11)) + bookmark(15), 1)
        assert watch.closed(300) == []
        assert query(watch, 300) == {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": "300",
            "resourceVersion": "15",
        }

    def test_breaking_off_goes_on_from_the_last_version_at_once(self) -> None:
        watch = watching()
        event = interrupted(watch.failed(UNREACHED, 300))
        assert (event.reason, event.delay, event.relist) == ("Broken", 0, False)
        assert query(watch, 300)["resourceVersion"] == "10"

    def test_short_life_without_event_is_an_error(self) -> None:
        watch = watching()
        watch.closed(300)
        watch.next(300)
        watch.opened(300)
        assert interrupted(watch.closed(300.9)).relist

    def test_short_life_with_an_event_waits_and_goes_on(self) -> None:
        watch = watching()
        watch.receive(frame("ADDED", pod("a", 11)), 0.5)
        event = interrupted(watch.closed(0.9))
        assert (event.delay, event.relist) == (0.8, False)
        assert query(watch, 60)["resourceVersion"] == "11"

    @pytest.mark.parametrize(
        ("failure", "reason"),
        [(UNREACHED, "Unreached"), (Failure("busy", 429), "Throttled")],
    )
    def test_a_busy_or_unreachable_server_is_asked_for_the_same_again(
        self, failure: Failure, reason: str
    ) -> None:
        watch = watching()
        watch.closed(300)
        watch.next(300)
        event = interrupted(watch.failed(failure, 300))
        assert (event.reason, event.delay, event.relist) == (reason, 0.8, False)
        assert watch.next(300.5) == Wait(pytest.approx(0.3))
        assert query(watch, 301)["resourceVersion"] == "10"

    @pytest.mark.parametrize(("status", "reason"), [(410, "Expired"), (500, "Refused")])
    def test_any_other_refusal_is_a_new_list(self, status: int, reason: str) -> None:
        watch = watching()
        watch.closed(300)
        watch.next(300)
        event = interrupted(watch.failed(Failure("no", status), 300))
        assert (event.reason, event.delay, event.relist) == (reason, 0.8, True)
        assert "resourceVersion" not in query(watch, 301)

    def test_retry_after_is_heeded_within_reason(self) -> None:
        for asked, got in ((7.0, 7.0), (0.1, 0.8), (86400.0, 60.0)):
            watch = watching()
            watch.closed(300)
            watch.next(300)
            assert interrupted(watch.failed(Failure("busy", 429, asked), 300)).delay == got

    def test_retry_after_of_an_error_in_the_stream_is_heeded(self) -> None:
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

    @pytest.mark.parametrize(("after", "delay"), [(119.0, 1.6), (121.0, 0.8)])
    def test_is_short_again_after_two_minutes_of_health(self, after: float, delay: float) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.failed(UNREACHED, 0)
        fresh.next(after)
        assert interrupted(fresh.failed(UNREACHED, after)).delay == delay


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
            if isinstance(action, Wait):
                now += action.seconds
                continue
            requests += 1
            fresh.opened(now)
            fresh.receive(bookmark(10, end=True) + error(410, "Expired"), now)
        assert requests <= 30

    def test_no_hot_loop_on_watches_that_end_at_once(self) -> None:
        watch, now, requests = watching(), 0.0, 0
        watch.closed(now)
        while now < 600:
            action = watch.next(now)
            if isinstance(action, Wait):
                now += action.seconds
                continue
            requests += 1
            watch.opened(now)
            watch.receive(bookmark(10, end=True), now)
            watch.closed(now)
        assert requests <= 30

    def test_reconnect_during_the_initial_events_starts_afresh(self) -> None:
        fresh = watcher()
        fresh.next(0)
        fresh.opened(0)
        fresh.receive(frame("ADDED", pod("newest", 99)) + frame("ADDED", pod("old", 3)), 0)
        fresh.failed(UNREACHED, 5)
        assert "resourceVersion" not in query(fresh, 60)
        (synced,) = fresh.page(page([pod("old", 3)], 100), 60)
        assert names(synced) == ["old"]

    def test_truncated_last_line_is_left_to_the_next_watch(self) -> None:
        watch = watching()
        assert watch.receive(frame("ADDED", pod("a", 11))[:-20], 1) == []
        assert watch.closed(300) == []
        assert query(watch, 300)["resourceVersion"] == "10"
        watch.opened(300)
        (event,) = watch.receive(frame("ADDED", pod("a", 11)), 301)
        assert isinstance(event, Upserted)

    def test_line_over_the_limit_is_named_and_skipped(self) -> None:
        watch = watcher(max_line=4096)
        watch.next(0)
        watch.opened(0)
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
        assert isinstance(watch.next(5), Wait)
        assert "sendInitialEvents" in query(watch, 60)

    def test_one_bad_object_does_not_stop_its_kind(self) -> None:
        events = watching().receive(
            frame("ADDED", pod("bad", 11, status=4)) + frame("ADDED", pod("good", 12)), 1
        )
        assert [type(event) for event in events] == [Faulted, Upserted]

    def test_garbage_is_no_sign_of_life(self) -> None:
        watch = watching()
        watch.closed(300)
        watch.next(300)
        watch.opened(300)
        assert isinstance(watch.receive(b"<html>\n", 300)[0], Faulted)
        assert interrupted(watch.closed(300.1)).relist
