"""The setup pod: the pod of a worker without everything that only training needs."""

from torchrun_api import names
from torchrun_api.json import JsonObject, object_at, objects_at
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.quantity import amount_of, format_bytes, format_cpu
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import PODS
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects import environment, network
from torchrun_controller.reconcile.objects.base import labels, metadata
from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.objects.environment import Environment
from torchrun_controller.reconcile.spec.pod_template import container_of
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec
from torchrun_controller.reconcile.spec.size import Size

# No GPU, and at most the resources of a worker, so that the setup pod is scheduled soon.
CPU, MEMORY = "1", "1Gi"
# Fields for gangs only: scheduler, host names, network and devices.
DROPPED_POD_FIELDS = ("schedulerName", "subdomain", "hostNetwork", "dnsPolicy", "resourceClaims")
# Fields for the command of the training container.
DROPPED_CONTAINER_FIELDS = ("ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle")


def setup_pod(
    job: TorchrunJob,
    queue: TorchrunQueue,
    run: ResolvedSpec,
    env: Environment,
    number: int,
    defaults: Defaults,
    *,
    claim_uid: str = "",
) -> Apply:
    """Return a setup pod with image, user, security, placement and variables of a worker.

    It mounts no PVC of the job but the workspace, and has no other container of the templates.
    """
    template = worker_template(job, queue, run, env, 0, "", defaults)
    spec, template_meta = object_at(template, "spec"), object_at(template, "metadata")
    meta = metadata(job, names.setup_pod(job.metadata.name, number), names.SETUP)
    pod_labels = object_at(template_meta, "labels") | labels(job, names.SETUP)
    del pod_labels[names.ATTEMPT_LABEL]
    meta["labels"] = pod_labels
    meta["annotations"] = {
        **object_at(template_meta, "annotations"),
        names.SETUP_KEY: env.key,
        names.GENERATION: str(job.metadata.generation),
        **({names.CLAIM_UID: claim_uid} if claim_uid else {}),
    }
    unused_volumes = {"checkpoints", *(f"dataset-{dataset.name}" for dataset in run.datasets)}
    trainer = container_of(spec, "containers", names.TRAINER_CONTAINER)
    pod = {name: value for name, value in spec.items() if name not in DROPPED_POD_FIELDS}
    pod["initContainers"] = [container_of(spec, "initContainers", names.LAUNCHER_CONTAINER)]
    pod["containers"] = [_container(job, run, env, trainer, unused_volumes)]
    pod["volumes"] = [v for v in objects_at(spec, "volumes") if v["name"] not in unused_volumes]
    return Apply(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod})


def _container(
    job: TorchrunJob,
    run: ResolvedSpec,
    env: Environment,
    trainer: JsonObject,
    unused_volumes: set[str],
) -> JsonObject:
    variables = environment.variables(env, creates=True)
    replaced_variables = {v["name"] for v in (*network.rendezvous_env(job, run, 0), *variables)}
    fields = {
        name: value for name, value in trainer.items() if name not in DROPPED_CONTAINER_FIELDS
    }
    return fields | {
        "name": names.SETUP_CONTAINER,
        "command": ["python3", names.LAUNCHER, "setup"],
        "env": [
            *(v for v in objects_at(trainer, "env") if v["name"] not in replaced_variables),
            *variables,
        ],
        "resources": _resources(run.size),
        "volumeMounts": [
            *(m for m in objects_at(trainer, "volumeMounts") if m["name"] not in unused_volumes),
            environment.mount(env),
        ],
    }


def _resources(size: Size) -> JsonObject:
    """Return the resources. The memory limit is the limit of a worker, for builds of packages."""
    cpu = min(amount_of(CPU), amount_of(size.requests.get("cpu", CPU)))
    memory = min(amount_of(MEMORY), amount_of(size.requests.get("memory", MEMORY)))
    resources: JsonObject = {"requests": {"cpu": format_cpu(cpu), "memory": format_bytes(memory)}}
    if "memory" in size.limits:
        resources["limits"] = {"memory": size.limits["memory"]}
    return resources
