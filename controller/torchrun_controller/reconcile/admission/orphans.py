"""Gangs whose job is deleted: they are charged until their last pod is gone.

A job may be deleted while no controller runs. An annotation of its child Jobs and pods records
their job, their queue and what each pod requests. Users can create such objects, too, so the number
of nodes in it is not believed: what counts are the pods that exist, and those that a Job creates.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from torchrun_api.core import Job, Pod
from torchrun_api.meta import ChildMeta
from torchrun_controller.reconcile.admission.classify import LONG_AGO, running_gang
from torchrun_controller.reconcile.admission.model import Workload
from torchrun_controller.reconcile.model import decode
from torchrun_controller.reconcile.pods.head_and_workers import has_head
from torchrun_controller.reconcile.pods.lifecycle import attempt_of, may_create_pods
from torchrun_controller.reconcile.spec.requests import Charge, admitted_requests


def orphaned_workloads(
    uid: str, child_jobs: Iterable[Job], pods: Iterable[Pod], lost_nodes: frozenset[str]
) -> tuple[Workload, ...]:
    """Return what runs of earlier jobs of one name; `uid` is the present job's, "" if none.

    `child_jobs` and `pods` are all those with that name, in the order of attempts.
    """
    jobs: dict[str, list[Job]] = {}
    workers: dict[str, list[Pod]] = {}
    charges: dict[str, tuple[Charge, ChildMeta]] = {}
    for child in child_jobs:
        if (charge := foreign_charge(uid, child.metadata)) is not None:
            jobs.setdefault(charge.job, []).append(child)
            charges[charge.job] = charge, child.metadata
    for pod in pods:
        if (charge := foreign_charge(uid, pod.metadata)) is not None:
            workers.setdefault(charge.job, []).append(pod)
            charges.setdefault(charge.job, (charge, pod.metadata))
    workloads = (
        _workload(*charges[job], tuple(jobs.get(job, ())), tuple(workers.get(job, ())), lost_nodes)
        for job in sorted(charges)
    )
    return tuple(workload for workload in workloads if workload is not None)


def foreign_charge(uid: str, meta: ChildMeta) -> Charge | None:
    """Return the charge of an object of another job than this one."""
    charge = decode.read(meta.annotations.charge, Charge)
    return None if charge is None or charge.job in ("", uid) else charge


def _workload(
    charge: Charge,
    meta: ChildMeta,
    child_jobs: tuple[Job, ...],
    pods: tuple[Pod, ...],
    lost_nodes: frozenset[str],
) -> Workload | None:
    """Return the workload; None if nothing of it runs, or its charge cannot be read."""
    gang = running_gang(child_jobs, pods, lost_nodes)
    requests = admitted_requests(charge.admission)
    creating_jobs = _creating_jobs(child_jobs)
    nodes = max(gang.live_nodes, sum(map(_pods_of, creating_jobs)))
    if requests is None or not nodes:
        return None
    if not (gang.heads_by_node or any(map(has_head, creating_jobs))):
        requests = replace(requests, head=None, head_gpus=0)
    return Workload(
        namespace=meta.namespace,
        name=meta.labels.torchrun_job,
        uid=charge.job,
        queue=charge.admission.queue,
        created=meta.creation_timestamp or LONG_AGO,
        nodes=nodes,
        pod=requests.pod,
        gpus=requests.gpus,
        head=requests.head,
        head_gpus=requests.head_gpus,
        admitted=nodes,
        pods_by_node=gang.placed_pods(requests.head),
        since=gang.since or meta.creation_timestamp,
        is_deleted=True,
    )


def _creating_jobs(child_jobs: tuple[Job, ...]) -> list[Job]:
    """Return the Jobs of the last attempt that may still create pods."""
    return [
        child
        for child in child_jobs
        if attempt_of(child) == attempt_of(child_jobs[-1])
        and may_create_pods(child)
        and not child.spec.suspend
    ]


def _pods_of(child: Job) -> int:
    """Return how many pods of the Job exist at once; its annotations are not believed."""
    parallelism, completions = child.spec.parallelism, child.spec.completions
    return parallelism if completions is None else min(parallelism, completions)
