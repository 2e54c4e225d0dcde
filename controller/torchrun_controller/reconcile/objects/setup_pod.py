"""The setup pod: a worker's pod without what only a training needs."""

from torchrun_api import names
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, object_at, objects_at
from torchrun_api.kinds import PODS
from torchrun_api.quantity import format_bytes, format_cpu, parse
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects import environment, network, volumes
from torchrun_controller.reconcile.objects.base import container_of, labels, metadata
from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.objects.environment import Environment
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec
from torchrun_controller.reconcile.spec.size import Size

# No GPU, and no more than a worker has: a setup is to run at once.
CPU, MEMORY = "1", "1Gi"
# What only a gang has: its scheduler, its names and network, its devices.
DROPPED_OF_POD = ("schedulerName", "subdomain", "hostNetwork", "dnsPolicy", "resourceClaims")
# What speaks of a command that serves.
DROPPED_OF_CONTAINER = ("ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle")


def setup_pod(
    job: TorchrunJob,
    queue: TorchrunQueue,
    run: ResolvedSpec,
    wanted: Environment,
    number: int,
    defaults: Defaults,
) -> Apply:
    """As a worker in all that bears on what is installed: image, user, security, place, variables.

    Of the job's claims it mounts the workspace alone, and no other container of a template runs.
    """
    template = worker_template(job, queue, run, wanted, 0, "", defaults)
    spec, shape = object_at(template, "spec"), object_at(template, "metadata")
    meta = metadata(job, names.setup_pod(job.metadata.name, number), names.SETUP)
    shaped = object_at(shape, "labels") | labels(job, names.SETUP)
    meta["labels"] = {name: text for name, text in shaped.items() if name != names.ATTEMPT_LABEL}
    meta["annotations"] = {
        **object_at(shape, "annotations"),
        names.SETUP_KEY: wanted.key,
        names.GENERATION: str(job.metadata.generation),
    }
    unused = {"checkpoints", *(f"dataset-{dataset.name}" for dataset in run.datasets)}
    trainer = container_of(spec, "containers", names.TRAINER_CONTAINER)
    pod = {name: value for name, value in spec.items() if name not in DROPPED_OF_POD}
    pod["initContainers"] = [container_of(spec, "initContainers", names.LAUNCHER_CONTAINER)]
    pod["containers"] = [_container(job, run, wanted, trainer, unused)]
    pod["volumes"] = [v for v in objects_at(spec, "volumes") if v["name"] not in unused]
    return Apply(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod})


def _container(
    job: TorchrunJob, run: ResolvedSpec, wanted: Environment, trainer: JsonObject, unused: set[str]
) -> JsonObject:
    told = environment.variables(wanted, made_here=True)
    replaced = {v["name"] for v in (*network.rendezvous_env(job, run, 0), *told)}
    kept = {name: value for name, value in trainer.items() if name not in DROPPED_OF_CONTAINER}
    return kept | {
        "name": names.SETUP_CONTAINER,
        "command": ["python3", f"{volumes.LAUNCHER_DIR}/launch", "setup"],
        "env": [
            *(v for v in objects_at(trainer, "env") if v["name"] not in replaced),
            *told,
        ],
        "resources": _resources(run.size),
        "volumeMounts": [
            *(m for m in objects_at(trainer, "volumeMounts") if m["name"] not in unused),
            environment.mount(wanted),
        ],
    }


def _resources(size: Size) -> JsonObject:
    """The memory limit is the worker's: what is built there may be built here."""
    cpu = min(parse(CPU), parse(size.requests.get("cpu", CPU)))
    memory = min(parse(MEMORY), parse(size.requests.get("memory", MEMORY)))
    resources: JsonObject = {"requests": {"cpu": format_cpu(cpu), "memory": format_bytes(memory)}}
    if "memory" in size.limits:
        resources["limits"] = {"memory": size.limits["memory"]}
    return resources
