"""Pods whose job is deleted: they are charged until the last of them is gone.

A job may be deleted while no controller runs. The labels of its pods name the job and its queue.
Users can write such labels and create such pods, so no number in them is believed: what counts are
pods with a machine, each with what its spec requests. The scheduler has found room for that.
"""

from collections.abc import Iterable

from torchrun_api.kinds.core import Job, Pod
from torchrun_api.kinds.meta import ChildMeta
from torchrun_controller.reconcile.admission.classify import LONG_AGO, running_gang, runs
from torchrun_controller.reconcile.admission.model import Workload
from torchrun_controller.reconcile.spec.requests import amounts_of_pod

_Shape = tuple[str, str, tuple[tuple[str, int], ...]]  # job, queue and requests of alike pods


def orphaned_workloads(
    uid: str, child_jobs: Iterable[Job], pods: Iterable[Pod], lost_nodes: frozenset[str]
) -> tuple[Workload, ...]:
    """Return what runs of earlier jobs of one name; `uid` is the present job's, "" if none.

    `child_jobs` and `pods` are all those with that name, in the order of attempts. A workload has
    pods with the same requests, so the gang of a head is two.
    """
    shapes: dict[_Shape, list[Pod]] = {}
    for pod in pods:
        if is_foreign(uid, pod.metadata) and pod.spec.node_name and runs(pod, lost_nodes):
            labels, requests = pod.metadata.labels, amounts_of_pod(pod.spec)
            shape = labels.job_uid, labels.queue, tuple(sorted(requests.items()))
            shapes.setdefault(shape, []).append(pod)
    created = {child.metadata.labels.job_uid: child for child in child_jobs}
    return tuple(
        _workload(f"{shape[0]}/{number}", shape, tuple(shapes[shape]), created.get(shape[0]))
        for number, shape in enumerate(sorted(shapes))
    )


def is_foreign(uid: str, meta: ChildMeta) -> bool:
    """Whether an object with the name of this job is of an earlier job of that name."""
    return meta.labels.job_uid not in ("", uid)


def _workload(name: str, shape: _Shape, pods: tuple[Pod, ...], child: Job | None) -> Workload:
    first, (_, queue, requests) = pods[0].metadata, shape
    since = first.creation_timestamp if child is None else child.metadata.creation_timestamp
    return Workload(
        namespace=first.namespace,
        name=first.labels.torchrun_job,
        uid=name,
        queue=queue,
        created=since or LONG_AGO,
        nodes=len(pods),
        pod=dict(requests),
        admitted=len(pods),
        pods_by_node=running_gang((), pods, frozenset(), 0).pods_by_node,
        since=since,
        is_deleted=True,
    )
