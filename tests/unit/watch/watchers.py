"""Watchers in the states from which tests start."""

from frames import page, pod
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.resources import PODS
from torchrun_controller.watch import (
    Event,
    FetchPage,
    Interrupted,
    StreamFailure,
    Synced,
    Watcher,
    WatchPause,
    WatchState,
)

EXPIRED = StreamFailure("too old", 410)
UNREACHED = StreamFailure("connection refused")
SILENT = StreamFailure("timeout on reading", silent=True)


def watcher(random: float = 0.0, max_line: int = 2**20) -> Watcher[Pod]:
    return Watcher(PODS, lambda: random, max_line=max_line)


def to_the_stream(watch: Watcher[Pod], now: float = 0) -> Watcher[Pod]:
    """Serve enough pages that the watcher switches to a streamed list."""
    for number in range(4):
        assert isinstance(watch.next(now), FetchPage)
        assert watch.page(page([pod("old", 3)], 9, token=f"t{number}"), now) == []
    assert watch.state is WatchState.STREAM_LISTING
    return watch


def streaming(random: float = 0.0, max_line: int = 2**20) -> Watcher[Pod]:
    """A watcher that is about to stream a long list."""
    return to_the_stream(watcher(random, max_line))


def listing() -> Watcher[Pod]:
    """A watcher at its first page, after the server refused to stream a list."""
    fresh = streaming()
    fresh.next(0)
    assert fresh.failed(StreamFailure("sendInitialEvents is forbidden", 422), 0) == []
    return fresh


def watching(version: int = 10) -> Watcher[Pod]:
    """A watcher with a complete list, on a watch that was opened at time 0."""
    fresh = watcher()
    fresh.next(0)
    fresh.page(page([], version), 0)
    fresh.next(0)
    fresh.record_open(0)
    assert fresh.state is WatchState.WATCHING
    return fresh


def names(event: Event[Pod]) -> list[str]:
    assert isinstance(event, Synced)
    return [obj.metadata.name for obj in event.objects]


def query(watch: Watcher[Pod], now: float = 0.0) -> dict[str, str]:
    action = watch.next(now)
    assert not isinstance(action, WatchPause)
    return dict(action.query)


def interrupted(events: list[Event[Pod]]) -> Interrupted:
    (event,) = events
    assert isinstance(event, Interrupted)
    return event
