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
    Failure,
    Faulted,
    FetchPage,
    Interrupted,
    Key,
    OpenStream,
    Synced,
    Upserted,
    Wait,
)
from torchrun_controller.watch.watcher import CLIENT_GO, PLAIN_PAGES, State, Timings, Watcher

__all__ = [
    "CLIENT_GO",
    "PLAIN_PAGES",
    "Action",
    "Bookmarked",
    "Deleted",
    "Event",
    "Failure",
    "Faulted",
    "FetchPage",
    "Interrupted",
    "Key",
    "OpenStream",
    "State",
    "Synced",
    "Timings",
    "Upserted",
    "Wait",
    "Watcher",
]
