"""The pure core: what is observed goes in, a Plan comes out.

`reconcile` is a function of its arguments alone: no I/O, no clock, no memory. All memory is in the
API's objects, so that the process may be killed anywhere and nothing is lost or done twice.
"""

from torchrun_controller.reconcile.job.steps import reconcile
from torchrun_controller.reconcile.model.observed import Conflict, Defaults, Observed, Rejection
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event, Plan, StatusWrite

__all__ = [
    "Apply",
    "Conflict",
    "Defaults",
    "Delete",
    "Event",
    "Observed",
    "Plan",
    "Rejection",
    "StatusWrite",
    "reconcile",
]
