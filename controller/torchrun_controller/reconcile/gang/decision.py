"""The decision of one reconcile: a state, writes, and the records of the status."""

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.status import Attempt, LastFailure
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec


class Writes(Struct, frozen=True, kw_only=True):
    """The writes of a decision, as in `Plan`. `requeue_after` is in seconds."""

    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status_before_deletes: bool = False
    requeue_after: float | None = None

    def and_also(
        self,
        *,
        applies: tuple[Apply, ...] = (),
        deletes: tuple[Delete, ...] = (),
        requeue_after: float | None = None,
    ) -> "Writes":
        """Return these writes and more, each once, with the sooner of the two times."""
        return replace(
            self,
            applies=(*self.applies, *(a for a in applies if a not in self.applies)),
            deletes=(*self.deletes, *(d for d in deletes if d not in self.deletes)),
            requeue_after=soonest(self.requeue_after, requeue_after),
        )


NO_WRITES = Writes()


class History(Struct, frozen=True, kw_only=True):
    """The records of attempts for the status: the new counts, new ends, and the root cause.

    `restarts_in_place` are those of the present attempt.
    """

    restarts_in_place: int = 0
    counts: Counts = Counts()
    ends: tuple[Attempt, ...] = ()
    failure: LastFailure | None = None


class Decision(Struct, frozen=True, kw_only=True):
    """The decision of a step. `attempt` is the number of the present or the new attempt.

    `spec` is the spec of the next gang, or of a gang without a status. `conditions` are set in
    addition to that of `state`. `commit` is the commit of the workspace. `warning` is an event for
    a change of the state.
    """

    state: State
    why: Reason
    attempt: int
    spec: ResolvedSpec | None = None
    conditions: tuple[ConditionUpdate, ...] = ()
    writes: Writes = Writes()
    history: History = History()
    commit: str = ""
    warning: Event | None = None


def soonest(*seconds: float | None) -> float | None:
    """Return the first of the times that are ahead; None for none."""
    return min((s for s in seconds if s is not None and s > 0), default=None)
