"""Which pods of a gang may run ranks, by the annotations of the controller."""

from collections.abc import Iterable

from bodies import Body
from torchrun_api import names


def gang_of(pod: Body) -> tuple[str, str, str]:
    """Namespace, job and attempt of a worker; other pods have no attempt."""
    meta = pod["metadata"]
    labels = meta.get("labels", {})
    job, attempt = labels.get(names.JOB_LABEL, ""), labels.get(names.ATTEMPT_LABEL, "")
    return meta.get("namespace", ""), job, attempt


def has_start(pod: Body) -> bool:
    """Whether the pod itself has the start annotation."""
    return names.START in pod["metadata"].get("annotations", {})


def follows_leader(pod: Body) -> bool:
    """Whether the worker starts its ranks with those of node 0."""
    meta = pod["metadata"]
    is_leader = meta["labels"].get(names.COMPLETION_INDEX_LABEL) == "0" and (
        meta["labels"].get(names.ROLE_LABEL) != names.WORKER
    )
    return meta.get("annotations", {}).get(names.GATE) == names.LEADER and not is_leader


def may_train(pod: Body, pods: Iterable[Body]) -> bool:
    """Whether ranks of the worker may run. `pods`: with the leader of its gang."""
    if has_start(pod):
        return True
    return follows_leader(pod) and any(
        gang_of(other) == gang_of(pod) and not follows_leader(other) and has_start(other)
        for other in pods
    )
