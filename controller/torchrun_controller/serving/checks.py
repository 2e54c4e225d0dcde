"""The health and readiness checks that `server` runs."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from torchrun_controller.leader import Leadership

Check: TypeAlias = Callable[[], str]
"""Called for each probe; returns the reason of the failure, "" for success."""

STUCK = 600.0  # seconds without activity after which the informer hangs


def watches_alive(idle: Mapping[str, Callable[[], float]], bound: float = STUCK) -> Check:
    """Return a liveness check: no informer is idle for more than `bound` seconds.

    `idle` returns the seconds since each informer last acted, by resource. It does not depend on
    the API server: a dead watch is opened again after 90 s, and a failed request is repeated. So
    only an informer that hangs fails the check. A check of the server's silence would restart every
    replica in an outage of ten minutes, and lose the caches.
    """

    def check() -> str:
        stuck = [f"{name} for {age():.0f} s" for name, age in idle.items() if age() > bound]
        return f"informers do not respond: {', '.join(stuck)}" if stuck else ""

    return check


def caches_synced(unsynced: Callable[[], Iterable[str]]) -> Check:
    """Return a readiness check: no cache is `unsynced`. That returns each one, and why."""

    def check() -> str:
        caches = ", ".join(unsynced())
        return f"not listed yet: {caches}" if caches else ""

    return check


def leads_or_stands_by(leadership: Leadership) -> Check:
    """Return a readiness check: the leader may write, or the standby can read the lease."""

    def check() -> str:
        if leadership.problem:
            return leadership.problem
        if leadership.elected.is_set() and not leadership.may_write():
            return "the lease is lost; the process is stopping"
        return ""

    return check
