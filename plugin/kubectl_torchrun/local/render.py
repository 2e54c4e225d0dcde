"""The objects that the controller would create for a job, for review and GitOps.

The controller's reconcile decides. Claims are bound and helper pods succeed at once, until the
first attempt needs no other object. Only the scheduler that the queue names counts as installed.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec
import yaml
from msgspec.structs import replace

from kubectl_torchrun import output
from kubectl_torchrun.errors import RunProblem, UsageProblem
from kubectl_torchrun.upload import user_manifest
from kubectl_torchrun.upload.unknown_fields import check_fields
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import (
    ClaimStatus,
    ContainerState,
    ContainerStatus,
    Job,
    PersistentVolumeClaim,
    Pod,
    PodStatus,
    Service,
    StateTerminated,
)
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS, SECRETS, SERVICES
from torchrun_controller.reconcile import Apply, Defaults, Observed, reconcile
from torchrun_controller.reconcile.model.observed import (
    Installed,
    ObservedCluster,
    ObservedGang,
    ObservedWorkspace,
)
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS

_UID = "00000000-0000-0000-0000-000000000000"
_DIGEST = "0" * 64
_SERVER_IP = "192.0.2.1"  # of an example (RFC 5737): the address of a serve pod is known later
_MOST_STEPS = 30
_READABLE = {
    CLAIMS.plural: PersistentVolumeClaim,
    PODS.plural: Pod,
    SERVICES.plural: Service,
    JOBS.plural: Job,
}
_NAMESPACE = "default"
T = TypeVar("T")


def read_documents(files: Sequence[str]) -> tuple[TorchrunJob, TorchrunQueue | None]:
    """Return the only TorchrunJob of the files, and its queue if one of them has it.

    Raises UsageProblem.
    """
    jobs: list[TorchrunJob] = []
    queues: dict[str, TorchrunQueue] = {}
    for file in files:
        for document in user_manifest.documents(file):
            match document.get("kind"):
                case "TorchrunJob":
                    jobs.append(_convert(document, TorchrunJob, file))
                case "TorchrunQueue":
                    queue = _convert(document, TorchrunQueue, file)
                    queues[queue.metadata.name] = queue
    if len(jobs) != 1:
        raise UsageProblem(f"The files have {len(jobs)} TorchrunJobs. Use exactly one.")
    (job,) = jobs
    return job, queues.get(job.spec.job_queue)


def render(job: TorchrunJob, queue: TorchrunQueue, image: str) -> list[JsonObject]:
    """Return the objects in the order of their creation. `image`: that of the controller.

    Raises RunProblem with the reason for which the controller would create no Job.
    """
    rendered: list[JsonObject] = []
    now = datetime(2026, 1, 1, tzinfo=UTC)
    meta = replace(
        job.metadata,
        uid=_UID,
        generation=1,
        namespace=job.metadata.namespace or _NAMESPACE,
        creation_timestamp=now,
        annotations={names.WORKSPACE_SHA256: _DIGEST, **job.metadata.annotations},
    )
    job = replace(job, metadata=meta, spec=replace(job.spec, suspend=False, depends_on=()))
    queue_meta = replace(queue.metadata, namespace=meta.namespace, uid=_UID)
    # Admission only decides when, so the queue takes no part in it.
    queue_spec = replace(queue.spec, quota=None, weight=None, cohort=None)
    queue = replace(queue, metadata=queue_meta, spec=queue_spec)
    created: list[Pod | Job | PersistentVolumeClaim | Service] = []
    for _ in range(_MOST_STEPS):
        plan = reconcile(_observed(job, queue, created), now, Defaults(runtime_image=image))
        new = [apply for apply in plan.applies if not apply.uid]
        if not new and any(isinstance(each, Job) for each in created):
            return rendered
        for apply in new:
            rendered.append(_with_content(apply))
            created += _created(apply, f"uid-{len(rendered)}", now)
        if plan.status is not None:
            job = replace(job, status=plan.status)
        now += timedelta(seconds=plan.requeue_after or 1)
    status = job.status
    raise RunProblem(f"No Job would be created: {status.reason}: {status.message}")


def print_objects(objects: Sequence[JsonObject], form: str) -> None:
    """Print YAML documents, or a List as JSON."""
    if form == "json":
        listed: JsonObject = {"apiVersion": "v1", "kind": "List", "items": [*objects]}
        output.write(listed, form)
        return
    output.put("---\n".join(yaml.safe_dump(each, sort_keys=False) for each in objects))


def _convert(document: JsonObject, kind: type[T], file: str) -> T:
    check_fields(file, document, kind)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise UsageProblem(f"{file}: {error}") from error


def _with_content(apply: Apply) -> JsonObject:
    """Return the object. The controller adds a random key to a Secret."""
    return apply.body | (
        {"stringData": {names.GANG_KEY: "RANDOM"}} if apply.kind is SECRETS else {}
    )


def _created(
    apply: Apply, uid: str, now: datetime
) -> Iterator[Pod | Job | PersistentVolumeClaim | Service]:
    kind = _READABLE.get(apply.kind.plural)
    if kind is None:
        return
    stored = msgspec.convert(apply.body, kind)
    meta = replace(stored.metadata, uid=uid, creation_timestamp=now, resource_version="1")
    match stored:
        case PersistentVolumeClaim():
            yield replace(stored, metadata=meta, status=ClaimStatus(phase="Bound"))
        case Pod():
            yield replace(stored, metadata=meta, status=_status_of_helper(stored, now))
        case _:
            yield replace(stored, metadata=meta)


def _status_of_helper(pod: Pod, now: datetime) -> PodStatus:
    """Return the status of a sync, serve or setup pod that has done its work."""
    result = {"sha256": _DIGEST, "manifest": _DIGEST, "revision": 1}
    end = StateTerminated(message=msgspec.json.encode(result).decode(), finished_at=now)
    sync = ContainerStatus(name=names.SYNC_CONTAINER, state=ContainerState(terminated=end))
    if pod.metadata.annotations.delivery:
        serve = ContainerStatus(name="serve", ready=True)
        return PodStatus(phase="Running", pod_ip=_SERVER_IP, container_statuses=(serve, sync))
    return PodStatus(phase="Succeeded", container_statuses=(sync,))


def _observed(
    job: TorchrunJob,
    queue: TorchrunQueue,
    created: Sequence[Pod | Job | PersistentVolumeClaim | Service],
) -> Observed:
    pods = [each for each in created if isinstance(each, Pod)]
    components = {pod.metadata.uid: pod.metadata.labels.component for pod in pods}
    scheduling = queue.spec.scheduling
    named = (
        scheduler
        for scheduler in SCHEDULERS.values()
        if scheduling.gang == scheduler.api.name
        or (scheduling.scheduler and scheduling.scheduler == scheduler.api.pod_scheduler)
    )
    kinds = (kind for scheduler in named for kind in (*scheduler.kinds, *scheduler.other_kinds))
    installed = Installed(resources=frozenset((kind.api_version, kind.plural) for kind in kinds))
    return Observed(
        job=job,
        queue=queue,
        gang=ObservedGang(
            child_jobs=tuple(j for j in created if isinstance(j, Job)),
            service=next((s for s in created if isinstance(s, Service)), None),
        ),
        workspace=ObservedWorkspace(
            claims=tuple(c for c in created if isinstance(c, PersistentVolumeClaim)),
            sync_pods=tuple(p for p in pods if components[p.metadata.uid] == names.SYNC),
            setup_pods=tuple(p for p in pods if components[p.metadata.uid] == names.SETUP),
        ),
        cluster=ObservedCluster(installed=installed),
    )
