"""What everybody who waits is told: a reason, and a message that a person can act on."""

from datetime import datetime, timedelta
from fractions import Fraction
from math import inf

from torchrun_api.quantity import format_bytes, format_cpu
from torchrun_controller.reconcile.admission.board import Ask, Board, Held, Line
from torchrun_controller.reconcile.admission.quota import KINDS, amounts
from torchrun_controller.reconcile.admission.shadow import Kept, Shadow
from torchrun_controller.reconcile.admission.state import (
    Preempt,
    QueueSummary,
    Reason,
    Request,
    Turn,
    Wait,
)

# Who is further behind learns that much only: its text must not change with each job that starts.
TOLD_EXACTLY = 10
TOLD_NAMES = 3
NOUNS = ("node", "GPU", "CPU", "memory", "job")


class Blocked:
    """Why the head of a queue waits."""

    def __init__(
        self,
        reason: Reason,
        head: Ask,
        *,
        kind: int | None = None,
        lender: Line | None = None,
        shadow: Shadow | None = None,
        over: Shadow | None = None,
    ) -> None:
        self.reason = reason
        self.head = head
        self.kind = kind  # of quota that is missing
        self.lender = lender  # whose own quota it would borrow
        self.shadow = shadow  # its reservation
        self.over = over  # another's reservation on nodes that it could use
        self.kept: Kept | None = None


class Teller:
    """Words about one decision."""

    def __init__(self, board: Board, now: datetime) -> None:
        self.board = board
        self.now = now

    def line(
        self, waits: dict[str, Wait], line: Line, ahead: list[Request], blocked: Blocked | None
    ) -> None:
        """Where everybody in the queue stands."""
        if line.closed:
            for position, request in enumerate(ahead, 1):
                waits[request.uid] = Wait("QueuePaused", line.closed, position)
            return
        why = ""
        for position, request in enumerate(ahead[:TOLD_EXACTLY], 1):
            ask = self.board.ask(line, request)
            text = f"{ordinal(position)} in {line.queue.name}, needs {needs(ask)}"
            if blocked is not None and request is blocked.head.request:
                waits[request.uid] = Wait(blocked.reason, text + self._why(blocked), position)
                why = f"; {request.name} is before it ({blocked.reason})"
            else:
                waits[request.uid] = Wait("BehindInQueue", text + why, position)
        step, next_step = TOLD_EXACTLY, TOLD_EXACTLY * 10
        text = f"more than {step} jobs are before it in {line.queue.name}"
        for position, request in enumerate(ahead[TOLD_EXACTLY:], TOLD_EXACTLY + 1):
            if position > next_step:
                step, next_step = next_step, next_step * 10
                text = f"more than {step} jobs are before it in {line.queue.name}"
            waits[request.uid] = Wait("BehindInQueue", text, position)

    def exceeds_quota(self, ask: Ask, kind: int) -> Wait:
        """More than the queue, with all that its cohort could lend, will ever have."""
        account = ask.line.account
        limit = told(kind, account.cohort.limit[kind])
        whose = f"cohort {ask.line.queue.cohort}" if ask.line.queue.cohort else "its quota"
        return Wait(
            "ExceedsQuota",
            f"needs {needs(ask)}; {whose} in queue {ask.line.queue.name} allows {limit} in all:"
            " ask for less, or have the quota raised",
        )

    def exceeds_nodes(self, ask: Ask) -> Wait:
        """More than all nodes that it may use offer when they are empty."""
        members = ask.shape.pool.members
        room = self.board.bare.capacity(ask.shape)
        selector = ask.request.node_selector
        which = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
        matching = f"nodes that match {which}" if which else "nodes that are ready"
        return Wait(
            "ExceedsNodes",
            f"needs {needs(ask)}; on the {len(members)} {matching} there would be room for {room}"
            f" of its {_counted(ask)}: ask for less on each or for fewer nodes",
        )

    def growth(self, ask: Ask) -> Wait:
        """An admitted job that has to go on with what it has."""
        kind = ask.line.account.lacks(ask.need)
        if kind is not None:
            return Wait("QuotaUsed", f"runs on; for {needs(ask)} more {self._left(ask, kind)}")
        if self.board.room.capacity(ask.shape) >= ask.slots:
            text = "what is free is kept for jobs that wait"
            return Wait("WaitingForTurn", f"runs on; for {needs(ask)} more, {text}")
        free = self._free(ask)
        return Wait("WaitingForNodes", f"runs on; needs {needs(ask)} more, {free}")

    def promised(self, ask: Ask, leaving: list[Held]) -> Wait:
        """It starts as soon as others have stopped."""
        line = ask.line.queue.name
        uid = ask.request.uid
        names = sorted(held.request.name for held in leaving if held.leaving == uid)
        told_names = ", ".join(names[:TOLD_NAMES]) or "others"
        message = f"next in {line}: room for {needs(ask)} is being freed by {told_names}"
        return Wait("Preempting", message, 0, nominated=True)

    def preempt(self, held: Held, ask: Ask) -> Preempt:
        """Why a job has to leave."""
        whom = f"{ask.request.namespace}/{ask.request.name}"
        if held.line is ask.line:
            return Preempt(
                uid=held.request.uid,
                for_uid=ask.request.uid,
                reason="HigherPriority",
                message=f"makes room for {whom}, whose priority is {ask.request.priority},"
                f" above its own {held.request.priority}",
            )
        return Preempt(
            uid=held.request.uid,
            for_uid=ask.request.uid,
            reason="Reclaimed",
            message=f"gives back what its queue borrowed in cohort {ask.line.queue.cohort}:"
            f" queue {ask.line.queue.name} needs its own for {whom}",
        )

    def summary(self, line: Line) -> QueueSummary:
        """What the queue's status shows."""
        account = line.account
        return QueueSummary(
            namespace=line.queue.namespace,
            name=line.queue.name,
            turn=Turn(weight=line.weight, current=line.turn.current, spare=line.spare.current),
            used=amounts(dict(enumerate(account.used))),
            free=account.free(),
            borrowed=amounts(dict(account.beyond())),
            pending=len(line.waiting) - line.admitted,
            admitted=len(line.held) + line.admitted,
            running=sum(held.request.running for held in line.held),
            message=line.closed,
        )

    def _why(self, blocked: Blocked) -> str:
        head = blocked.head
        if blocked.reason == "QuotaUsed":
            assert blocked.kind is not None
            assert blocked.kept is not None
            assert blocked.kept.last is not None
            left = self._left(head, blocked.kind)
            return f"; {left}{self._next(blocked.kept.last, blocked.kept.seconds)}"
        if blocked.lender is not None:
            lender = blocked.lender.queue.name
            return f", of which a part would be borrowed: queue {lender} waits for its own first"
        text = f", {self._free(head)}"
        if blocked.shadow is not None:
            return text + self._next(blocked.shadow.last, blocked.shadow.seconds)
        assert blocked.over is not None
        first = blocked.over.ask
        return f"{text}; {first.request.name} of queue {first.line.queue.name} is next there"

    def _next(self, last: Held, seconds: float) -> str:
        name = last.request.name
        if last.leaving:
            return f", next: {name} stops"
        if seconds == inf:
            return f", next: {name} ends or is preempted"
        by = self.now + timedelta(seconds=seconds)
        return f", next: {name} ends, by {by:%Y-%m-%dT%H:%M}Z at the latest"

    def _left(self, ask: Ask, kind: int) -> str:
        cohort = ask.line.account.cohort
        left = told(kind, max(0, cohort.limit[kind] - cohort.used[kind]))
        limit = told(kind, cohort.limit[kind])
        whose = f"cohort {ask.line.queue.cohort}" if ask.line.queue.cohort else "the quota"
        return f"{left} of {limit} are left of {whose}"

    def _free(self, ask: Ask) -> str:
        pods = min(ask.slots, self.board.room.capacity(ask.shape))
        if ask.request.gpus:
            return f"{told(1, pods * ask.request.gpus)} free"
        return f"room for {pods} of {_counted(ask)}"


def _counted(ask: Ask) -> str:
    return f"{ask.slots} pods" + (" beside its head" if ask.pods > ask.slots else "")


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, up to 20th."""
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"


def told(kind: int, amount: int) -> str:
    """An amount of one of KINDS with its unit."""
    if KINDS[kind] == "memory":
        return f"{format_bytes(Fraction(amount))} of memory"
    number = format_cpu(Fraction(amount, 1000)) if KINDS[kind] == "cpu" else str(amount)
    return f"{number} {NOUNS[kind]}{'' if number == '1' else 's'}"


def needs(ask: Ask) -> str:
    """What it asks for: `16 GPUs on 2 nodes`."""
    nodes = told(0, ask.pods)
    return f"{told(1, ask.need[1])} on {nodes}" if ask.need[1] else nodes
