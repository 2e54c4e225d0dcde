"""What the coordinator writes: of each job and queue of which it has something new to say.

In this order, each part only when the one before it is written: what is given back, what room is
kept for, who gives way, who is admitted, what queues have used (so that no turn is charged for an
admission that failed), and then the rest. Killed in between, nothing is promised twice: a charge
goes before the admission that needs its room.
"""

from datetime import datetime
from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.admission import Admission
from torchrun_api.job import TorchrunJob
from torchrun_api.meta import Condition
from torchrun_api.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.reconcile.admission.standing import Standing
from torchrun_controller.reconcile.admission.state import (
    Admit,
    Decisions,
    Preempt,
    Request,
    Wait,
)
from torchrun_controller.reconcile.model.conditions import ADMITTED, ConditionUpdate, Reason, update
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.requests import GangRequests, admission_of

# The first of each queue are told their place exactly, as it changes. Of those further behind the
# place may be out by a quarter: each is written a few times on its way, not at each admission.
EXACT = 20

GIVEN_BACK = Reason("Requeued", "nothing of it runs any more; it waits for its turn again")


class Stage(IntEnum):
    """When it is written; each stage waits for those before it."""

    GIVE_BACK = 0
    KEEP_ROOM = 1
    PREEMPT = 2
    ADMIT = 3
    ACCOUNT = 4
    TELL = 5


class Said(Struct, frozen=True, kw_only=True):
    """What the coordinator says of a job: all that is its own in the job's status."""

    claim: ConditionUpdate | None = None
    admission: Admission | None = None
    position: int | None = None


class Word(Struct, frozen=True, kw_only=True):
    """A new status of one job or queue; `rank` orders what may be late (lowest first)."""

    owner: TorchrunJob | TorchrunQueue
    status: TorchrunJobStatus | TorchrunQueueStatus
    stage: Stage
    rank: int = 0


class Verdicts:
    """The decisions on jobs, by UID."""

    def __init__(self, decisions: Decisions) -> None:
        self._admits = {admit.uid: admit for admit in decisions.admits}
        self._preempts = {preempt.uid: preempt for preempt in decisions.preempts}
        self._limits = {one.uid: one.nodes for one in decisions.gives_back}
        self._waits = decisions.waits

    def on(self, job: TorchrunJob, standing: Standing, now: datetime) -> Word | None:
        """What is new of this job; None if it is all said."""
        uid = job.metadata.uid
        admit, preempt = self._admits.get(uid), self._preempts.get(uid)
        wait = self._waits.get(uid)
        before = said_of(job)
        after = _say(job, standing, before, admit, preempt, wait, now)
        if after.admission is not None:
            limit = _limit(standing, after.admission, self._limits.get(uid, 0))
            after = replace(after, admission=replace(after.admission, limit=limit))
        if after == before or (wait and _close_enough(before, after)):
            return None
        rank = after.position if after.position is not None else 0
        return Word(
            owner=job, status=_status(job, after, now), stage=_stage(before, after), rank=rank
        )


def said_of(job: TorchrunJob) -> Said:
    """What the job's status has of it."""
    claims = (
        ConditionUpdate(c.type, c.status, Reason(c.reason, c.message))
        for c in job.status.conditions
        if c.type == ADMITTED
    )
    return Said(
        claim=next(claims, None),
        admission=job.status.admission,
        position=job.status.queue_position,
    )


def _say(
    job: TorchrunJob,
    standing: Standing,
    before: Said,
    admit: Admit | None,
    preempt: Preempt | None,
    wait: Wait | None,
    now: datetime,
) -> Said:
    request = standing.request
    if standing.requeued:
        return Said(claim=ConditionUpdate(ADMITTED, "False", GIVEN_BACK))
    if request is None or not standing.takes_part:
        return Said()
    held = request.admitted if admit is None else admit.nodes
    if held == 0:
        return before if wait is None else _waiting(wait)
    charge = before.admission or Admission(time=request.since)
    since = now if request.admitted == 0 else charge.time
    charge = replace(_recorded(charge, request), nodes=held, time=since, nominated=False)
    if preempt is not None:
        why = Reason(admission_status.PREEMPTED, preempt.message)
        charge = replace(charge, preempted_for=preempt.for_uid)
        return Said(claim=ConditionUpdate(ADMITTED, "False", why), admission=charge)
    if admission_status.preempted(job):
        return Said(claim=before.claim, admission=charge)
    if standing.outdated and admit is None:
        return Said(
            claim=ConditionUpdate(ADMITTED, "False", _why_outdated(standing)), admission=charge
        )
    return Said(claim=_holding(held, request.nodes, wait), admission=charge)


def _limit(standing: Standing, charge: Admission, decided: int) -> int:
    """Once set it stays until that much is given back, or another gang is there."""
    request = standing.request
    uses = None if request is None else request.uses
    limit = decided or charge.limit
    return limit if uses is not None and uses <= limit < charge.nodes else 0


def _recorded(charge: Admission, request: Request) -> Admission:
    """With what is admitted, where it does not say that yet."""
    if charge.queue:
        return charge
    asked = GangRequests(
        nodes=request.nodes,
        pod=request.pod,
        gpus=request.gpus,
        head=request.head,
        head_gpus=request.head_gpus,
    )
    record = admission_of(asked, request.queue)
    return replace(
        charge,
        queue=record.queue,
        requests=record.requests,
        gpus=record.gpus,
        head=record.head,
    )


def _why_outdated(standing: Standing) -> Reason:
    message = f"{standing.outdated}; gives back what it was admitted for, and is admitted again"
    return Reason(admission_status.OUTDATED, message)


def _waiting(wait: Wait) -> Said:
    return Said(
        claim=ConditionUpdate(ADMITTED, "False", Reason(wait.reason, wait.message)),
        admission=Admission(nominated=True) if wait.nominated else None,
        position=wait.position or None,
    )


def _holding(held: int, wanted: int, wait: Wait | None) -> ConditionUpdate:
    nodes = f"{held} node{'' if held == 1 else 's'}"
    if wait is None or wanted <= held:
        return ConditionUpdate(ADMITTED, "True", Reason("Admitted", f"admitted for {nodes}"))
    message = f"admitted for {nodes} of {wanted}; {wait.message}"
    return ConditionUpdate(ADMITTED, "True", Reason("Admitted", message))


def _close_enough(before: Said, after: Said) -> bool:
    """Whether only the place far behind in a queue is another, and not by much."""
    shown, place = before.position, after.position
    if shown is None or place is None or place <= EXACT:
        return False
    return replace(after, position=shown) == before and abs(shown - place) <= place // 4


def _stage(before: Said, after: Said) -> Stage:
    had = before.admission or Admission()
    has = after.admission or Admission()
    if has.nodes < had.nodes or (had.nominated and has == Admission()):
        return Stage.GIVE_BACK
    if has.preempted_for and has.preempted_for != had.preempted_for:
        return Stage.PREEMPT
    # Not where a number below 0, which is nobody's of ours, is taken back.
    if has.nodes > max(had.nodes, 0):
        return Stage.ADMIT
    return Stage.KEEP_ROOM if has.nominated and not had.nominated else Stage.TELL


def _status(job: TorchrunJob, said: Said, now: datetime) -> TorchrunJobStatus:
    claims = [said.claim] if said.claim is not None else []
    conditions: tuple[Condition, ...] = update(
        job.status.conditions, claims, job.metadata.generation, now
    )
    return TorchrunJobStatus(
        conditions=conditions, admission=said.admission, queue_position=said.position
    )
