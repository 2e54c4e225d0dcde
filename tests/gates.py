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
    return bool(pod["metadata"].get("annotations", {}).get(names.START, ""))


def follows_leader(pod: Body) -> bool:
    """Whether the worker starts its ranks with those of node 0."""
    annotations: Body = pod["metadata"].get("annotations", {})
    return annotations.get(names.GATE) == names.LEADER and not _is_leader(pod)


def _is_leader(pod: Body) -> bool:
    labels: Body = pod["metadata"].get("labels", {})
    is_first = labels.get(names.COMPLETION_INDEX_LABEL) == "0"
    return is_first and labels.get(names.ROLE_LABEL) != names.WORKER


def may_train(pod: Body, pods: Iterable[Body]) -> bool:
    """Whether ranks of the worker may run. `pods`: with the leader of its gang."""
    if has_start(pod):
        return True
    return follows_leader(pod) and any(
        gang_of(other) == gang_of(pod)
        and _is_leader(other)
        and has_start(other)
        and (_job_of(other) == _job_of(pod) or _is_head_of(other, pod))
        for other in pods
    )


def _is_head_of(leader: Body, pod: Body) -> bool:
    """Whether the leader, which has a Job of its own, belongs to the same TorchrunJob."""
    return names.ROLE_LABEL in pod["metadata"]["labels"] and _run_of(leader) == _run_of(pod)


def _run_of(pod: Body) -> str:
    """The UID of the TorchrunJob of the pod."""
    return str(pod["metadata"]["labels"].get(names.JOB_UID_LABEL, ""))


def _job_of(pod: Body) -> str:
    """The UID of the pod's Job. An earlier job of the same name had others."""
    owners: list[Body] = pod["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")
