"""The wait between the end of a gang and its successor."""

from datetime import datetime

from msgspec import Struct

from torchrun_api.status import Attempt
from torchrun_controller.reconcile.gang.restarts import delay
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Observed


class Wait(Struct, frozen=True):
    """What the status says of the wait, and the seconds that are left of it."""

    why: Reason
    left: float


def waits(observed: Observed, ended: Attempt, now: datetime) -> Wait | None:
    """The wait after this gang; None once it is over, or if there is none."""
    before = tuple(a for a in observed.job.status.attempts if a.number != ended.number)
    length = delay(before, ended)
    left = (length - (now - (ended.end_time or now))).total_seconds()
    if left <= 0:
        return None
    message = f"attempt {ended.number + 1} starts {length.total_seconds():.0f} s after the end"
    return Wait(Reason("BackingOff", f"{message}; {ended.message}"), left)
