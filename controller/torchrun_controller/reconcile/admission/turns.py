"""Smooth weighted round robin over queues, charged by what is handed out.

For one unit of cost it is nginx' algorithm: every eligible queue advances by its weight, the
largest comes next (the first by name where two are equal) and pays the sum of the weights. {5,1,1}
gives a a b a c a a. A cost of c is c such rounds at once: all advance by c x weight, the chosen one
pays c x sum. The running weights are whole numbers and kept in the status of the queues.
"""

from collections.abc import Iterable, Sequence

from torchrun_controller.reconcile.admission.state import Queue, Turn


class Runner:
    """A queue's place in one round robin."""

    __slots__ = ("current", "weight")

    def __init__(self, weight: int, current: int) -> None:
        self.weight = weight
        self.current = current


def start(queues: Sequence[Queue]) -> list[Turn]:
    """The running weights to go on with; all begin anew where a weight has changed."""
    weights = [1 if queue.weight is None else queue.weight for queue in queues]
    turns = [queue.turn for queue in queues]
    changed = any(
        turn is not None and turn.weight != weight
        for turn, weight in zip(turns, weights, strict=True)
    )
    return [
        Turn(weight=weight) if turn is None or changed else turn
        for turn, weight in zip(turns, weights, strict=True)
    ]


def rank(runner: Runner, cost: int) -> int:
    """What the round robin compares: where the queue would be after its advance."""
    return runner.current + runner.weight * cost


def charge(chosen: Runner, cost: int, eligible: Iterable[Runner]) -> None:
    """`chosen`, which is one of `eligible`, was handed out so much."""
    total = 0
    for runner in eligible:
        runner.current += runner.weight * cost
        total += runner.weight
    chosen.current -= total * cost
