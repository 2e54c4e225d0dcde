"""What one reconcile found, and the steps that it calls for."""

from msgspec import Struct

from torchrun_api.status import Attempt, LastFailure
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec


class Decision(Struct, frozen=True, kw_only=True):
    """A finding with its reason; `queue`, `workspace` and `dependencies` say why these
    are ready, if so.

    `commit` is what a workspace that is ready now was made of.

    `ended` are the gangs that are given up, `failure` the root cause of its end.
    """

    state: State
    why: Reason
    attempt: int
    run: ResolvedSpec | None = None
    queue: Reason | None = None
    workspace: Reason | None = None
    dependencies: Reason | None = None
    commit: str = ""
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status_before_deletes: bool = False  # see Plan
    requeue_after: float | None = None
    counts: Counts = Counts()
    ended: tuple[Attempt, ...] = ()
    failure: LastFailure | None = None
    capacity: ConditionUpdate | None = None
    newer: ConditionUpdate | None = None  # of newer code that workers do not have yet
    storage: Reason | None = None  # what is wrong with the claims of a gang that lives
    probes: int = 0


def soonest(*seconds: float | None) -> float | None:
    """The first of the deadlines that are still ahead."""
    return min((s for s in seconds if s is not None and s > 0), default=None)
