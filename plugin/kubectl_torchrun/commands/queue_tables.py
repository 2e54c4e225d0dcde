"""Queues: how much of their quota is used, and who waits in them for what."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from kubectl_torchrun import output
from kubectl_torchrun.cluster.slices import Job, Queue
from torchrun_api import quantity

WAITING = frozenset({"", "Pending", "Syncing", "Queued", "Preempted"})
BAR = 10


def queue_table(
    queues: Sequence[Queue], jobs: Sequence[Job], everywhere: bool, width: int | None
) -> list[str]:
    """Lines, by name: a bar for what is used of the quota, and how many jobs run and wait."""
    running, waiting = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for job in jobs:
        key = (job.metadata.namespace, job.spec.job_queue)
        running[key] += job.status.phase == "Running"
        waiting[key] += job.status.phase in WAITING
    head = ["NAMESPACE"] * everywhere + [
        *("NAME", "USED", "WEIGHT", "QUOTA", "RUNNING", "WAITING", "GPUS/NODE", "AGE", "IMAGE"),
    ]
    rows = []
    for queue in sorted(queues, key=_name):
        meta, spec = queue.metadata, queue.spec
        rows.append(
            [meta.namespace] * everywhere
            + [
                meta.name,
                used(queue),
                "-" if spec.weight is None else f"{spec.weight:g}",
                ",".join(f"{name}={value}" for name, value in spec.quota.items()) or "-",
                str(running[_name(queue)]),
                str(waiting[_name(queue)]),
                str(spec.node_resources.gpus),
                output.age(meta.creation_timestamp),
                spec.image or "-",
            ]
        )
    return output.columns(head, rows, width, ("GPUS/NODE", "AGE", "WEIGHT", "IMAGE", "QUOTA"))


def waiting_table(jobs: Sequence[Job], everywhere: bool, width: int | None) -> list[str]:
    """Lines for the jobs that wait to be admitted, by queue and place; none where none waits."""
    waiting = [job for job in jobs if job.status.phase in WAITING and _why(job)]
    if not waiting:
        return []
    head = ["NAMESPACE"] * everywhere + ["QUEUE", "PLACE", "JOB", "NODES", "AGE", "WHY"]
    rows = [
        [job.metadata.namespace] * everywhere
        + [
            job.spec.job_queue,
            str(job.status.queue_position or "-"),
            job.metadata.name,
            nodes(job),
            output.age(job.metadata.creation_timestamp),
            _why(job),
        ]
        for job in sorted(waiting, key=_place)
    ]
    return output.columns(head, rows, width, ("AGE", "NODES"))


def used(queue: Queue) -> str:
    """`[########--] 16/20 GPUs`: the bar is of the resource that is scarcest."""
    said = queue.status.admission
    if said is None:
        return "-"
    shares = [
        taken / (taken + left)
        for kind, amount in said.free.items()
        if (taken := _amount(said.used.get(kind, 0))) + (left := _amount(amount)) > 0
    ]
    if not shares:
        return said.summary or "-"
    filled = int(max(shares) * BAR)  # full only where nothing is left
    return f"[{'#' * filled}{'-' * (BAR - filled)}] {said.summary}".rstrip()


def nodes(job: Job) -> str:
    """Nodes as they are or were asked for; GPUs where only they are known."""
    known = job.status.num_nodes or job.spec.num_nodes
    if known is None:
        return f"{job.spec.num_gpus} GPUs" if job.spec.num_gpus else "-"
    return str(known)


def _why(job: Job) -> str:
    """What the coordinator says; empty for a job that it has admitted or not seen."""
    for condition in job.status.conditions:
        if condition.type == "Admitted" and condition.status != "True":
            return condition.message or condition.reason
    return ""


def _amount(value: object) -> Fraction:
    try:
        return quantity.parse(value if isinstance(value, int) else str(value))
    except ValueError:
        return Fraction(0)


def _name(queue: Queue) -> tuple[str, str]:
    return (queue.metadata.namespace, queue.metadata.name)


def _place(job: Job) -> tuple[str, str, float, str]:
    place = job.status.queue_position
    key = float("inf") if place is None else place
    return (job.metadata.namespace, job.spec.job_queue, key, job.metadata.name)
