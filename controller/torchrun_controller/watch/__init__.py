"""List and watch as a sans-IO state machine: feed it bytes and time, it yields events.

    watcher = Watcher(PODS, random.random)
    match watcher.next(now):
        case Wait(seconds): ...
        case FetchPage(query, timeout): events = watcher.page(body, now)
        case OpenStream(query, silence, total):
            watcher.record_open(now)
            events = watcher.receive(chunk, now)

`events` are Synced, Upserted, Deleted, Bookmarked, Faulted and Interrupted.
"""

from torchrun_controller.watch.events import (
    Action,
    Bookmarked,
    Deleted,
    Event,
    Faulted,
    FetchPage,
    Interrupted,
    Key,
    OpenStream,
    StreamFailure,
    Synced,
    Upserted,
    WatchPause,
)
from torchrun_controller.watch.watcher import CLIENT_GO, PLAIN_PAGES, Timings, Watcher, WatchState

__all__ = [
    "CLIENT_GO",
    "PLAIN_PAGES",
    "Action",
    "Bookmarked",
    "Deleted",
    "Event",
    "Faulted",
    "FetchPage",
    "Interrupted",
    "Key",
    "OpenStream",
    "StreamFailure",
    "Synced",
    "Timings",
    "Upserted",
    "WatchPause",
    "WatchState",
    "Watcher",
]
