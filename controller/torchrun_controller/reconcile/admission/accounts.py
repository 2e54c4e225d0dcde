"""A queue as the coordinator sees it, and its account as the queue's status has it."""

from collections.abc import Iterable
from fractions import Fraction
from math import floor

from torchrun_api.admission import QueueAdmission, Quota
from torchrun_api.quantity import QuantityError, format_bytes, format_cpu, parse
from torchrun_api.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_controller.reconcile.admission.state import (
    Amounts,
    Limits,
    Queue,
    QueueSummary,
    Turn,
)
from torchrun_controller.reconcile.admission.told import Stage, Word


def queue_of(queue: TorchrunQueue) -> Queue:
    """The queue with its quota in whole numbers, and what was said last of its turns."""
    spec, meta = queue.spec, queue.metadata
    paused = queue.invalid
    if meta.deletion_timestamp is not None:
        paused = "the queue is being deleted"
    quota = Limits()
    try:
        quota = _limits(spec.quota or Quota())
    except QuantityError as error:
        paused = f"spec.quota: {error}"
    return Queue(
        namespace=meta.namespace,
        name=meta.name,
        weight=spec.weight,
        quota=quota,
        cohort=spec.cohort or "",
        paused=paused,
        turn=turn_of(queue),
    )


def _limits(quota: Quota) -> Limits:
    return Limits(
        nodes=quota.nodes,
        gpus=quota.gpus,
        cpu=None if quota.cpu is None else floor(parse(quota.cpu) * 1000),
        memory=None if quota.memory is None else floor(parse(quota.memory)),
        jobs=quota.jobs,
    )


def of_queues(queues: Iterable[TorchrunQueue], summaries: tuple[QueueSummary, ...]) -> list[Word]:
    """What is new of each queue; of one that takes no part any more, nothing."""
    by_name = {(summary.namespace, summary.name): summary for summary in summaries}
    words = []
    for queue in queues:
        meta = queue.metadata
        summary = by_name.get((meta.namespace, meta.name))
        after = None if summary is None else account(summary)
        if after != queue.status.admission:
            status = TorchrunQueueStatus(admission=after)
            words.append(Word(owner=queue, status=status, stage=Stage.ACCOUNT))
    return words


def account(summary: QueueSummary) -> QueueAdmission:
    """The queue's account as its status has it."""
    turn = summary.turn
    return QueueAdmission(
        summary=_summary(summary),
        used=_quantities(summary.used),
        free=_quantities(summary.free),
        borrowed=_quantities(summary.borrowed),
        weight=turn.weight,
        current=turn.current,
        spare=turn.spare,
    )


def turn_of(queue: TorchrunQueue) -> Turn | None:
    """What `account` has kept of the queue's turns."""
    kept = queue.status.admission
    if kept is None:
        return None
    return Turn(weight=kept.weight, current=kept.current, spare=kept.spare)


def _summary(summary: QueueSummary) -> str:
    """What is used of what there is, by the first thing that the quota limits: GPUs go first."""
    for kind, unit in (("gpus", "GPUs"), ("nodes", "nodes"), ("jobs", "jobs")):
        used, free = getattr(summary.used, kind), getattr(summary.free, kind)
        if free is not None:
            own = used - getattr(summary.borrowed, kind) + free
            return f"{used}/{own} {unit}"
    used = summary.used
    return f"{used.gpus} GPUs" if used.gpus else f"{used.nodes} nodes"


def _quantities(amounts: Amounts | Limits) -> dict[str, int | str]:
    """What is counted, in the units of a quota; what is not limited, or not used, is left out."""
    found: dict[str, int | str] = {}
    for kind in ("nodes", "gpus", "jobs"):
        value = getattr(amounts, kind)
        if value or (value == 0 and isinstance(amounts, Limits)):
            found[kind] = value
    cpu, memory = amounts.cpu, amounts.memory
    if cpu or (cpu == 0 and isinstance(amounts, Limits)):
        found["cpu"] = format_cpu(Fraction(cpu, 1000))
    if memory or (memory == 0 and isinstance(amounts, Limits)):
        found["memory"] = format_bytes(Fraction(memory))
    return found
