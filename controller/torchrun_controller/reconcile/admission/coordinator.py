"""Admission over all queues at once: who may run, and what everybody else waits for."""

from datetime import datetime

from torchrun_controller.reconcile.admission.board import Ask, Board, Line
from torchrun_controller.reconcile.admission.quota import amounts
from torchrun_controller.reconcile.admission.state import (
    Decisions,
    QueueSummary,
    Reason,
    State,
    Turn,
    Wait,
)
from torchrun_controller.reconcile.admission.turns import charge, rank


def admit(state: State, now: datetime) -> Decisions:
    """What is to be done about the state; the same for the same objects in any order."""
    board = Board(state)
    waits: dict[str, Wait] = {}
    blocked: list[Ask] = []
    active = [line for line in board.lines if not line.closed]
    while True:
        heads = [head for line in active if (head := _head(board, line, waits)) is not None]
        able = [head for head in heads if head.line.account.lacks(head.need) is None]
        if not able:
            break
        chosen = max(able, key=lambda head: rank(head.line.turn, head.cost))
        placement = None
        if not any(chosen.shape.members & other.shape.members for other in blocked):
            placement = board.room.place(chosen.shape, chosen.pods)
        if placement is None:
            blocked.append(chosen)
            active.remove(chosen.line)
            continue
        rivals = [head.line for head in able if head.shape.members & chosen.shape.members]
        rivals = rivals or [chosen.line]
        charge(chosen.line.turn, chosen.cost, [line.turn for line in rivals])
        charge(chosen.line.spare, chosen.cost, [line.spare for line in rivals])
        board.grant(chosen, placement)
        chosen.line.next += 1
    for line in board.lines:
        _tell(line, waits)
    return Decisions(
        admits=tuple(board.admits),
        waits=waits,
        queues=tuple(_summary(line) for line in board.lines),
    )


def _head(board: Board, line: Line, waits: dict[str, Wait]) -> Ask | None:
    while line.next < len(line.waiting):
        ask = board.ask(line, line.waiting[line.next])
        if line.account.exceeds(ask.need) is not None:
            waits[ask.request.uid] = Wait(
                reason="ExceedsQuota", message="asks for more than the quota"
            )
        elif board.bare.capacity(ask.shape) < ask.pods:
            waits[ask.request.uid] = Wait(
                reason="ExceedsNodes", message="asks for more than all nodes"
            )
        else:
            return ask
        line.next += 1
    return None


def _tell(line: Line, waits: dict[str, Wait]) -> None:
    for position, request in enumerate(line.waiting[line.next :], 1):
        reason: Reason = "BehindInQueue" if position > 1 else "WaitingForNodes"
        message = line.closed or f"number {position} in {line.queue.name}"
        waits[request.uid] = Wait(
            reason="QueuePaused" if line.closed else reason, message=message, position=position
        )


def _summary(line: Line) -> QueueSummary:
    account = line.account
    return QueueSummary(
        namespace=line.queue.namespace,
        name=line.queue.name,
        turn=Turn(weight=line.weight, current=line.turn.current, spare=line.spare.current),
        used=amounts(dict(enumerate(account.used))),
        free=account.free(),
        borrowed=amounts(dict(account.beyond())),
        pending=len(line.waiting),
        admitted=len(line.holding),
        running=sum(request.running for request in line.holding),
        message=line.closed,
    )
