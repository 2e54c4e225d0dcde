"""Probe pods show whether the scheduler has room for one more worker.

A probe has the requests and constraints of a worker, and an idle container. It stays Pending while
there is no room, and is deleted once it has a node. It preempts nothing, because it has no priority
class.
"""

from torchrun_api import names
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at
from torchrun_api.kinds import PODS
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.base import (
    RESTRICTED_CONTAINER,
    RESTRICTED_USER,
    metadata,
)
from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.schedulers.choice import choose
from torchrun_controller.reconcile.schedulers.gang_objects import build_probe, probe_obstacle
from torchrun_controller.reconcile.spec.resolve import resolve_spec

# Fields of a worker's PodSpec that decide on the nodes where it may run.
PLACEMENT_FIELDS = (
    *("schedulerName", "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints"),
    *("runtimeClassName", "overhead", "resourceClaims", "imagePullSecrets"),
)


def missing_probes(
    observed: Observed, count: int, defaults: Defaults
) -> tuple[tuple[Apply, ...], str]:
    """Return the probes that are missing of the first `count`, and why there are none, or "".

    The larger gang waits for nothing but room, so there is a queue with its scheduler.

    Raises:
        InvalidSpecError: no run is possible with this job and queue.
    """
    job, queue, installed = observed.job, observed.queue, observed.cluster.installed
    assert queue is not None
    probe_names = [names.probe(job.metadata.name, index) for index in range(count)]
    for rejection in observed.refused.rejections:
        if rejection.name in probe_names:
            return (), f"The API server refused pod {rejection.name}: {rejection.message}"
    obstacle = probe_obstacle(choose(queue, installed, job))
    if obstacle:
        return (), obstacle
    run = resolve_spec(job, queue)
    template = worker_template(job, queue, run, None, 0, "", defaults)
    bodies = [_probe(job, template, name, defaults) for name in probe_names]
    probes = [
        Apply(PODS, build_probe(job, queue, installed, run, template, body)) for body in bodies
    ]
    taken_names = {pod.metadata.name for pod in observed.gang.probes} | {
        c.name for c in observed.refused.conflicts
    }
    return tuple(probe for probe in probes if probe.name not in taken_names), ""


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
