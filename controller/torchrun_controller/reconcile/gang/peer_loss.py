"""A rank that lost a peer is a victim: the peer tells the cause, now and then a moment later."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from torchrun_api.core import Pod
from torchrun_api.status import LastFailure
from torchrun_controller.reconcile.pods.lifecycle import alive

# What gloo, NCCL and sockets say when the other end is gone.
WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "socket timeout",
)
# A launcher ends within a second of its rank, and its kubelet tells of it within another.
PATIENCE = timedelta(seconds=3)
# On nodes that have more to do than cores to do it, these took more than three (at a load of 20);
# and a blamed victim is worse than a restart some seconds later.
PATIENCE_WITH_PEERS = timedelta(seconds=10)


def is_secondary(said: LastFailure) -> bool:
    """Whether its last words are of a peer that went away."""
    words = said.message.lower()
    return any(known in words for known in WORDS)


def left(said: LastFailure, pods: Iterable[Pod], now: datetime) -> float | None:
    """Seconds for which a better word may still come from a worker that has not ended yet."""
    victim = is_secondary(said) and any(alive(pod) for pod in pods)
    return patience_left(said, now, PATIENCE_WITH_PEERS) if victim else None


def patience_left(said: LastFailure, now: datetime, patience: timedelta = PATIENCE) -> float | None:
    """What is left of the seconds for which a failure waits for a better word."""
    # Of the future: clocks differ, and nobody knows how long it has been.
    if said.time is None or not timedelta() <= (age := now - said.time) < patience:
        return None
    return (patience - age).total_seconds()
