"""Gangs whose job is gone: they are charged until the last of their pods is.

A job may be deleted while no controller runs, so nothing is remembered of it. Its child Jobs and
pods say by an annotation which job and queue they are of, and what they are charged with.
"""

from collections.abc import Iterable

from torchrun_api.core import Job, Pod
from torchrun_api.meta import ChildMeta
from torchrun_controller.reconcile.admission.standing import LONG_AGO, running
from torchrun_controller.reconcile.admission.state import Request
from torchrun_controller.reconcile.model import decode
from torchrun_controller.reconcile.spec.requests import Charge, admitted_requests


def of_other_jobs(
    uid: str, child_jobs: Iterable[Job], pods: Iterable[Pod], lost: frozenset[str]
) -> tuple[Request, ...]:
    """What runs of earlier jobs of one name; `uid` is that of the present job, "" without one.

    `child_jobs` and `pods` are all that bear the name, in the order of attempts.
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
    requests = (
        _request(*charges[job], tuple(jobs.get(job, ())), tuple(workers.get(job, ())), lost)
        for job in sorted(charges)
    )
    return tuple(request for request in requests if request is not None)


def foreign_charge(uid: str, meta: ChildMeta) -> Charge | None:
    """What an object is charged with for another job than this one."""
    if not meta.annotations.charge:
        return None
    charge = decode.read(meta.annotations.charge, Charge)
    return None if charge is None or charge.job in ("", uid) else charge


def _request(
    charge: Charge,
    meta: ChildMeta,
    child_jobs: tuple[Job, ...],
    pods: tuple[Pod, ...],
    lost: frozenset[str],
) -> Request | None:
    """None where nothing of it runs, or nobody can say what it is charged with."""
    present = running(child_jobs, pods, lost)
    requests = admitted_requests(charge.admission)
    if requests is None or not present.nodes:
        return None
    nodes = max(requests.nodes, present.nodes)
    return Request(
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
        placed=present.placed,
        since=present.since or meta.creation_timestamp,
        gone=True,
    )
