"""Checks of health and readiness, which `server` lists."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torchrun_controller.leader import Leadership

Check: TypeAlias = Callable[[], str]
"""Called at each probe; returns why it fails, "" if it does not."""

STUCK = 600.0  # seconds without activity after which only a restart helps


def watches_alive(idle: Mapping[str, Callable[[], float]], bound: float = STUCK) -> Check:
    """Liveness: the seconds since each informer last did anything, by resource, against a bound.

    Independent of the API server: a watch notices its own death after 90 s and is opened again, and
    a failed request is repeated. The bound catches only an informer that hangs. A check of the
    server's silence would restart every replica in an outage of ten minutes, and their caches are
    needed when the server is back.
    """

    def check() -> str:
        stuck = [f"{name} for {age():.0f} s" for name, age in idle.items() if age() > bound]
        return f"the watch hangs of {', '.join(stuck)}" if stuck else ""

    return check


def caches_synced(
    synced: Mapping[str, Callable[[], bool]], problem: Callable[[str], str] = lambda resource: ""
) -> Check:
    """Readiness: whether each cache holds its first list; `problem` explains why not."""

    def check() -> str:
        missing = [
            f"{resource} ({problem(resource) or 'the first list is on its way'})"
            for resource, done in synced.items()
            if not done()
        ]
        return f"not listed yet: {', '.join(missing)}" if missing else ""

    return check


def leads_or_stands_by(leadership: Leadership) -> Check:
    """Readiness: the leader may write, or a standby can read the lease."""

    def check() -> str:
        if leadership.problem:
            return leadership.problem
        if leadership.elected.is_set() and not leadership.may_write():
            return "the lease is lost, the process is about to stop"
        return ""

    return check
