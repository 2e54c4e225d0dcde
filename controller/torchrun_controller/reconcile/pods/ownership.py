"""Which pods belong to the gangs of a job.

The labels are no proof: a copy for debugging has them, too.
"""

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_api.kinds import JOBS
from torchrun_api.meta import ChildMeta, find_controller


def is_worker_of(job: str, meta: ChildMeta) -> bool:
    """Whether a Job of any attempt, or of an earlier job of this name, created the pod.

    A Job owns its pods. A pod whose Job was deleted with --cascade=orphan has no owner, but a name
    with the Job's name as prefix.
    """
    owner = find_controller(meta.owner_references)
    if owner is None:
        return names.is_worker(job, meta.name)
    return owner.kind == JOBS.kind and names.is_child_job(job, owner.name)


def uses_room(pod: Pod) -> bool:
    """Whether the pod uses the room of a gang."""
    meta, labels = pod.metadata, pod.metadata.labels
    return labels.component == names.WORKER and is_worker_of(labels.torchrun_job, meta)
