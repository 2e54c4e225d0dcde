"""Smooth weighted round robin over queues, charged by what each queue gets.

For one unit of cost it is nginx' algorithm: every eligible queue advances by its weight, the
largest comes next (of equal ones the first by name) and pays the sum of the weights. {5,1,1}
gives a a b a c a a. A cost of c is c such rounds at once: all advance by c x weight, the chosen one
pays c x sum. The running weights are integers in the status of the queues.

A queue without waiting jobs restarts from 0, and a new one starts from 0. If it had got less than
its share, the queues that had got more owe it nothing any longer: else they would wait until each
new queue has got as much. If it had got more, those that have waited keep their credit.
"""

from collections.abc import Collection, Iterable, Sequence

from torchrun_controller.reconcile.admission.model import Queue, RoundRobinState


class Peer:
    """A queue in one round robin."""

    __slots__ = ("current", "weight")

    def __init__(self, weight: int, current: int) -> None:
        self.weight = weight
        self.current = current


def initial_states(queues: Sequence[Queue]) -> list[RoundRobinState]:
    """Return the running weights to continue with; all restart from 0 if a weight has changed."""
    pairs = [(queue.round_robin, 1 if queue.weight is None else queue.weight) for queue in queues]
    has_changed = any(state is not None and state.weight != weight for state, weight in pairs)
    return [
        RoundRobinState(weight=weight) if state is None or has_changed else state
        for state, weight in pairs
    ]


def forgive_debts(waiting: Collection[Peer]) -> None:
    """Reduce what queues owe to no more than the credit of those that wait.

    A queue that waits no more has left the rest. Their order stays.
    """
    credit = sum(peer.current for peer in waiting if peer.current > 0)
    debt = -sum(peer.current for peer in waiting if peer.current < 0)
    for peer in waiting:
        if peer.current < 0 and debt > credit:
            peer.current = -(-peer.current * credit // debt)


def rank(peer: Peer, cost: int) -> int:
    """Return the sort key of the round robin: the running weight of the queue after its advance."""
    return peer.current + peer.weight * cost


def charge(chosen: Peer, cost: int, eligible: Iterable[Peer]) -> None:
    """Charge `chosen`, which is one of `eligible`, with this cost."""
    total = 0
    for peer in eligible:
        peer.current += peer.weight * cost
        total += peer.weight
    chosen.current -= total * cost
