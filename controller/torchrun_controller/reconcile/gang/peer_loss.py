"""A rank that lost its peer is not the cause: the failure of the peer is, and may show up later."""

import re
from collections.abc import Iterable
from datetime import datetime, timedelta

from torchrun_api.core import Pod
from torchrun_api.peer_loss import PEER_LOSS
from torchrun_api.status import LastFailure
from torchrun_controller.reconcile.pods.lifecycle import alive

_PEER_LOSS = re.compile("|".join(PEER_LOSS), re.IGNORECASE)
# A launcher exits within a second of its rank, and its kubelet reports that within another.
CAUSE_WAIT = timedelta(seconds=3)
# Overloaded nodes took more than three seconds (at a load of 20). A restart that is some seconds
# later is better than the wrong cause.
PEER_WAIT = timedelta(seconds=10)
# The clock of the controller may be behind those of nodes and API server by this much.
CLOCK_SKEW = timedelta(minutes=5)


# The launcher's reason if it stopped its ranks because of a failure on another node.
PEER_FAILED = "PeerFailed"


def is_secondary(failure: LastFailure) -> bool:
    """Whether the failure is the loss of a peer, by its reason or its message."""
    return failure.reason == PEER_FAILED or bool(_PEER_LOSS.search(failure.message))


def peer_wait_left(failure: LastFailure, pods: Iterable[Pod], now: datetime) -> float | None:
    """Return the seconds to wait for the failure of the peer; None where it cannot come."""
    if not is_secondary(failure) or not any(alive(pod) for pod in pods):
        return None
    return wait_left(failure, now, PEER_WAIT)


def wait_left(failure: LastFailure, now: datetime, wait: timedelta = CAUSE_WAIT) -> float | None:
    """Return the seconds that are left of `wait` since the failure; None for no more.

    A time in the future is that of a clock that is ahead: the whole wait is left. Nothing waits for
    a time that is further ahead than CLOCK_SKEW.
    """
    if failure.time is None or not -CLOCK_SKEW <= (age := now - failure.time) < wait:
        return None
    return (wait - max(age, timedelta())).total_seconds()
