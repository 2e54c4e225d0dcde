"""Probe pods show whether the scheduler has room for one more worker.

A probe has the requests and constraints of a worker, and an idle container. It stays Pending while
there is no room, and is deleted once it has a node. It preempts nothing, because it has no priority
class.
"""

from torchrun_api import names
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at
from torchrun_api.kinds import JOBS, PODS
from torchrun_controller.reconcile.gang.gang import next_attempt
from torchrun_controller.reconcile.model.observed import (
    Defaults,
    Observed,
    ObservedGang,
    RefusedWrites,
)
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.base import (
    RESTRICTED_CONTAINER,
    RESTRICTED_USER,
    metadata,
)
from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.schedulers.choice import choose
from torchrun_controller.reconcile.schedulers.gang_objects import build_probe, probe_obstacle
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import resolve_spec

# Fields of a worker's PodSpec that decide on the nodes where it may run.
PLACEMENT_FIELDS = (
    *("schedulerName", "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints"),
    *("runtimeClassName", "overhead", "resourceClaims", "imagePullSecrets"),
)


def missing_probes(
    observed: Observed, count: int, defaults: Defaults
) -> tuple[tuple[Apply, ...], str]:
    """Return the probes that are missing of the first `count`, and why there are none, or ""."""
    if count == 0:
        return (), ""
    job, queue, installed = observed.job, observed.queue, observed.cluster.installed
    probe_names = [names.probe(job.metadata.name, index) for index in range(count)]
    next_jobs = _jobs_of_next_gang(job, observed.gang, observed.refused)
    for rejection in observed.refused.rejections:
        if rejection.name in probe_names:
            return (), f"The API server refused pod {rejection.name}: {rejection.message}"
        if rejection.resource == JOBS.resource and rejection.name in next_jobs:
            # The larger gang cannot be created yet. Each retry would create and delete probes.
            return (), f"The API server refused Job {rejection.name}: {rejection.message}"
    if queue is None:
        return (), f"TorchrunQueue {job.spec.job_queue} does not exist."
    try:
        run = resolve_spec(job, queue)
        obstacle = probe_obstacle(choose(queue, installed, job))
        if obstacle:
            return (), obstacle
        template = worker_template(job, queue, run, None, 0, "", defaults)
        bodies = [_probe(job, template, name, defaults) for name in probe_names]
        probes = [
            Apply(PODS, build_probe(job, queue, installed, run, template, body)) for body in bodies
        ]
    except InvalidSpecError as error:
        return (), str(error)
    taken_names = {pod.metadata.name for pod in observed.gang.probes} | {
        c.name for c in observed.refused.conflicts
    }
    return tuple(probe for probe in probes if probe.name not in taken_names), ""


def _jobs_of_next_gang(
    job: TorchrunJob, gang: ObservedGang, refused: RefusedWrites
) -> tuple[str, str]:
    """Return the names of the Jobs that the next gang may have."""
    name, attempt = job.metadata.name, next_attempt(job, gang, refused)
    return names.child_job(name, attempt), names.workers_job(name, attempt)


def _probe(job: TorchrunJob, template: JsonObject, name: str, defaults: Defaults) -> JsonObject:
    worker, meta = object_at(template, "spec"), metadata(job, name, names.PROBE)
    spec: JsonObject = {field: worker[field] for field in PLACEMENT_FIELDS if field in worker}
    spec |= {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": RESTRICTED_USER,
        "containers": [_idle(c, defaults) for c in objects_at(worker, "containers")],
        # A PVC may be usable on some nodes only.
        "volumes": [v for v in objects_at(worker, "volumes") if "persistentVolumeClaim" in v],
    }
    own_labels, worker_labels = (
        object_at(meta, "labels"),
        object_at(object_at(template, "metadata"), "labels"),
    )
    # Gang schedulers and topology rules select by labels. A probe belongs to no attempt.
    meta["labels"] = {
        k: v for k, v in worker_labels.items() if k != names.ATTEMPT_LABEL
    } | own_labels
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _idle(container: JsonObject, defaults: Defaults) -> JsonValue:
    """Return a container with the same resources that does nothing."""
    return {
        "name": container["name"],
        "image": defaults.runtime_image,
        "imagePullPolicy": defaults.runtime_image_pull_policy,
        "command": ["sleep", "infinity"],
        "securityContext": RESTRICTED_CONTAINER,
        "resources": container.get("resources", {}),
    }
