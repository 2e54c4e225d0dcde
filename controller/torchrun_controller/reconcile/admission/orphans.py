"""Gangs whose job is deleted: they are charged until their last pod is gone.

A job may be deleted while no controller runs. An annotation of its child Jobs and pods records
their job, their queue and their charge.
"""

from collections.abc import Iterable

from torchrun_api.core import Job, Pod
from torchrun_api.meta import ChildMeta
from torchrun_controller.reconcile.admission.classify import LONG_AGO, running_gang
from torchrun_controller.reconcile.admission.model import Workload
from torchrun_controller.reconcile.model import decode
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
    if requests is None or not gang.nodes:
        return None
    nodes = max(requests.nodes, gang.nodes)
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
