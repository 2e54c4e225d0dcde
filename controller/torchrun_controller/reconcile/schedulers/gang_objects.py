"""The group and the child Jobs of a gang, in the form that the chosen gang scheduler needs."""

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.schedulers.choice import Choice, choose
from torchrun_controller.reconcile.schedulers.scheduler import Gang, GangObjects
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec


def build_gang_objects(
    job: TorchrunJob,
    queue: TorchrunQueue,
    installed: Installed | None,
    run: ResolvedSpec,
    attempt: int,
    child_jobs: tuple[Apply, ...],
    kai_quota_namespaces: tuple[str, ...],
) -> tuple[Apply, ...]:
    """Return the groups of a gang and then its Jobs: the group of a pod must exist first.

    The gang has the name of the last child Job.

    Raises:
        InvalidSpecError: the scheduler cannot express what the job asks for.
    """
    choice = choose(queue, installed, job)
    templates = [_object(_object(child.body, "spec"), "template") for child in child_jobs]
    gang = _build_gang(job, queue, installed, run, attempt, child_jobs[-1].name, *templates)
    gang = replace(gang, kai_quota=queue.metadata.namespace in kai_quota_namespaces)
    build = SCHEDULERS[choice.gang].build
    objects = [build(replace(gang, template=template)) for template in templates]
    patched_jobs = (
        _patch_job(child, patches, choice)
        for child, patches in zip(child_jobs, objects, strict=True)
    )
    return (*objects[0].groups, *patched_jobs)


def _patch_job(child: Apply, patches: GangObjects, choice: Choice) -> Apply:
    body = child.body
    spec = _object(body, "spec")
    template = merge(_set_scheduler(_object(spec, "template"), choice), patches.template)
    job = merge({**body, "spec": {**spec, "template": template}}, patches.job)
    if choice.gang != "none":
        job = merge(job, {"metadata": {"annotations": {names.GANG_SCHEDULER: choice.gang}}})
    return Apply(child.kind, job)


def _build_gang(
    job: TorchrunJob,
    queue: TorchrunQueue,
    installed: Installed | None,
    run: ResolvedSpec,
    attempt: int,
    name: str,
    template: JsonObject,
    *heads: JsonObject,
) -> Gang:
    """Return the gang with pods of this template, and of the template of its head if it has one."""
    elastic = job.spec.elastic
    nodes = run.size.nodes
    least = min(nodes, elastic.min_nodes) if elastic else nodes
    return Gang(
        job=job,
        queue=queue,
        name=name,
        attempt=attempt,
        nodes=nodes,
        least=least,
        template=template,
        parts=((template, least - len(heads)), *((head, 1) for head in heads)),
        topology=job.spec.scheduling.topology or queue.spec.scheduling.topology,
        installed=installed or Installed(),
    )


def _set_scheduler(template: JsonObject, choice: Choice) -> JsonObject:
    return merge(
        template, {"spec": {"schedulerName": choice.scheduler}} if choice.scheduler else {}
    )


def _object(body: JsonObject, name: str) -> JsonObject:
    value = body[name]
    assert isinstance(value, dict)
    return value
