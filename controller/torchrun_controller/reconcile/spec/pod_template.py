"""What a podTemplate may set of a pod's life, and the containers that each worker pod has.

Launchers restart the ranks, in the same pods, and the controller creates new gangs. So the kubelet
restarts no container.
"""

from collections.abc import Iterator

import msgspec

from torchrun_api import names
from torchrun_api.contract import launch
from torchrun_api.contract.variable import TESTS, USER, Variable
from torchrun_api.json import JsonObject, object_at, objects_at
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.shared import PodTemplate
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

LONGEST_GRACE = 31536000  # as of reliability.terminationGracePeriodSeconds
_GRACE = "terminationGracePeriodSeconds"
_PLACEMENT = ("nodeSelector", "affinity")
_FIXED = ("hostname", "subdomain")
# Variables of workers that no user sets.
RESERVED = frozenset(
    variable.name
    for variable in vars(launch).values()
    if isinstance(variable, Variable) and not {USER, TESTS} & {*variable.set_by}
)
_TOKEN = "automountServiceAccountToken"  # noqa: S105  # a field's name
LAUNCHER_RESOURCES: JsonObject = {"cpu": "100m", "memory": "64Mi"}


def defaults(queue: TorchrunQueue) -> JsonObject:
    """What a template may change: training needs neither Services' variables nor a token."""
    pod: JsonObject = {"enableServiceLinks": False}
    return pod if queue.spec.service_account_name else {**pod, _TOKEN: False}


def placement(template: PodTemplate) -> JsonObject:
    """The fields of a template that say on which machines its pod may run, without tolerations."""
    return {name: template.spec[name] for name in _PLACEMENT if name in template.spec}


def trainer_image(template: PodTemplate) -> str:
    """The image of the training container in a template; "" without one."""
    containers = objects_at(template.spec, "containers")
    images = (c.get("image") for c in containers if c.get("name") == names.TRAINER_CONTAINER)
    return str(next(images, None) or "")


def trainer_resource(
    templates: tuple[PodTemplate, ...], name: str, kinds: tuple[str, ...] = ("limits", "requests")
) -> int | str | None:
    """The limit, or the request, of a resource for the training container; the last one counts."""
    for template in reversed(templates):
        for container in objects_at(template.spec, "containers"):
            if container.get("name") == names.TRAINER_CONTAINER:
                resources = object_at(container, "resources")
                for kind in kinds:
                    value = object_at(resources, kind).get(name)
                    if isinstance(value, int | str):
                        return value
    return None


def check(queue: TorchrunQueue, job: TorchrunJob | None = None) -> None:
    """Refuse what cannot be honoured in the template of a queue, and in those of its job.

    Raises:
        InvalidSpecError: a template sets another restartPolicy than Never, or a grace period that
            is none; or it mounts a token where the queue's own template says that none is; or it
            sets something that the controller sets.
    """
    final = queue.spec.pod_template.spec.get(_TOKEN) is False
    for path, template in _templates(queue, job):
        spec = template.spec
        policy, grace = spec.get("restartPolicy"), spec.get(_GRACE)
        if policy not in (None, "Never"):
            raise InvalidSpecError(
                f"{path}.spec.restartPolicy is {_json(policy)}, but the kubelet does not restart"
                " pods of a gang: launchers restart the ranks in these pods, and the controller"
                " creates new gangs. reliability.maxRestarts limits both. Remove the field."
            )
        if grace is not None and grace_of(template) is None:
            raise InvalidSpecError(
                f"{path}.spec.{_GRACE} is {_json(grace)}. Set it to an integer from 0 to"
                f" {LONGEST_GRACE} (seconds)."
            )
        _check_fixed(path, spec)
        if final and _TOKEN in spec and spec[_TOKEN] is not False:
            raise InvalidSpecError(
                f"{path}.spec.{_TOKEN} is {_json(spec[_TOKEN])}, but podTemplate of TorchrunQueue"
                f" {queue.metadata.name} sets it to false. Remove the field or choose another"
                " queue."
            )


def _check_fixed(path: str, spec: JsonObject) -> None:
    """Refuse fields of a v1 PodSpec that the controller or the Job controller sets."""
    for field in _FIXED:
        if spec.get(field) is not None:
            raise InvalidSpecError(
                f"{path}.spec.{field} is {_json(spec[field])}, but the nodes of a gang find each"
                " other by names that the controller sets. Remove the field."
            )
    for container in objects_at(spec, "containers"):
        if container.get("name") != names.TRAINER_CONTAINER:
            continue
        for field in ("command", "args"):
            if container.get(field) is not None:
                raise InvalidSpecError(
                    f"{path} sets {field} of the container trainer, which runs the launcher. Set"
                    " spec.command of the job instead."
                )
        for variable in objects_at(container, "env"):
            if variable.get("name") in RESERVED:
                raise InvalidSpecError(
                    f"{path} sets the variable {variable['name']}, which the controller sets."
                    " Remove it (sizes, ports and backends have their own fields)."
                )


def grace_of_job(job: TorchrunJob) -> int | None:
    """The longest grace period that the job's templates ask for, in seconds."""
    head = (job.spec.head.pod_template,) if job.spec.head is not None else ()
    grace_periods = (grace_of(template) for template in (job.spec.pod_template, *head))
    return max((seconds for seconds in grace_periods if seconds is not None), default=None)


def grace_of(template: PodTemplate) -> int | None:
    """The grace period that a template asks for, in seconds; None for none, or an invalid one."""
    seconds = template.spec.get(_GRACE)
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        return None
    return seconds if 0 <= seconds <= LONGEST_GRACE else None


def _templates(queue: TorchrunQueue, job: TorchrunJob | None) -> Iterator[tuple[str, PodTemplate]]:
    yield f"TorchrunQueue {queue.metadata.name}: podTemplate", queue.spec.pod_template
    if job is not None:
        yield "spec.podTemplate", job.spec.pod_template
    if job is not None and job.spec.head is not None:
        yield "spec.head.podTemplate", job.spec.head.pod_template


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()[:80]


def container_of(pod: JsonObject, kind: str, name: str) -> JsonObject:
    """Return the container of this name, not a copy; `kind` is "containers" or "initContainers"."""
    return next(item for item in objects_at(pod, kind) if item.get("name") == name)


def set_launcher_resources(pod: JsonObject) -> None:
    """Give the launcher of a v1 PodSpec requests and limits for the same resources as the trainer.

    A ResourceQuota of CPU or memory refuses containers without them. A scheduler with its own
    quotas (Kueue) refuses resources that it does not know.
    """
    trainer = container_of(pod, "containers", names.TRAINER_CONTAINER)
    trainer_resources = object_at(trainer, "resources")
    resources: JsonObject = {}
    for kind in ("requests", "limits"):
        quantities: JsonObject = {
            name: quantity
            for name, quantity in LAUNCHER_RESOURCES.items()
            if name in object_at(trainer_resources, kind)
        }
        if quantities:
            resources[kind] = quantities
    if resources:
        launcher = container_of(pod, "initContainers", names.LAUNCHER_CONTAINER)
        launcher.setdefault("resources", resources)
