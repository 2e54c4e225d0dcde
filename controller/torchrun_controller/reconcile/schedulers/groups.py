"""The groups of gang schedulers: built with a gang, deleted after it, and why they let it wait."""

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Job, SchedulingGroup
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import JOBS
from torchrun_api.kinds.status import TERMINAL
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import Defaults, Installed, Observed, ObservedGang
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.model.times import find_end
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    delete_job,
    may_create_pods,
)
from torchrun_controller.reconcile.schedulers.scheduler import (
    GangObjects,
    GangScheduler,
    ScheduledGang,
)
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS, Choice
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec

# By the value of the annotation GANG_SCHEDULER.
_ADMITTERS: dict[str, GangScheduler] = {
    name: gang_scheduler
    for name, gang_scheduler in SCHEDULERS.items()
    if gang_scheduler.api.admits_jobs
}
# Types and status of conditions that mean: the gang is not scheduled, or not admitted.
_REFUSALS = {refusal for scheduler in SCHEDULERS.values() for refusal in scheduler.refusals}


def build_gang_objects(
    observed: Observed,
    run: ResolvedSpec,
    attempt: int,
    choice: Choice,
    child_jobs: tuple[Apply, ...],
    defaults: Defaults,
) -> tuple[Apply, ...]:
    """Return the groups of a gang and then its Jobs: the group of a pod must exist first.

    The gang has the name of the last child Job.

    Raises:
        InvalidSpecError: the scheduler cannot express what the job asks for.
    """
    job, queue = observed.job, observed.queue
    assert queue is not None
    templates = [_object(_object(child.body, "spec"), "template") for child in child_jobs]
    template, *heads = templates
    nodes = run.size.nodes
    least = min(nodes, job.spec.elastic.min_nodes) if job.spec.elastic else nodes
    gang = ScheduledGang(
        job=job,
        queue=queue,
        name=child_jobs[-1].name,
        attempt=attempt,
        nodes=nodes,
        least=least,
        template=template,
        parts=((template, least - len(heads)), *((head, 1) for head in heads)),
        topology=job.spec.scheduling.topology or queue.spec.scheduling.topology,
        installed=observed.cluster.installed or Installed(),
        kai_quota=queue.metadata.namespace in defaults.kai_quota_namespaces,
    )
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
    name: JsonObject = {"spec": {"schedulerName": choice.scheduler}} if choice.scheduler else {}
    template = merge(merge(_object(spec, "template"), name), patches.template)
    job = merge({**body, "spec": {**spec, "template": template}}, patches.job)
    if choice.gang != "none":
        job = merge(job, {"metadata": {"annotations": {names.GANG_SCHEDULER: choice.gang}}})
    return Apply(child.kind, job)


def _object(body: JsonObject, name: str) -> JsonObject:
    value = body[name]
    assert isinstance(value, dict)
    return value


def delete_unused(
    job: TorchrunJob, gang: ObservedGang, applies: tuple[Apply, ...]
) -> tuple[Delete, ...]:
    """Delete groups of finished gangs, which would still reserve capacity in their scheduler.

    A group is kept while a pod of its attempt may run, while its child Job may create pods, and if
    `applies` creates that Job. Suspended Jobs of gangs whose end is recorded and of a finished
    job are deleted too: Kueue would resume them.
    """
    needed_names = {apply.name for apply in applies if apply.kind is JOBS}
    latest = gang.child_jobs[-1:]
    needed_names |= {child.metadata.name for child in latest if may_create_pods(child)}
    running_attempts = {pod.metadata.labels.attempt for pod in gang.pods if alive(pod)}
    uid = job.metadata.uid
    group_deletes = tuple(
        Delete.of(group.kind, meta)
        for group in gang.groups
        if (meta := group.object.metadata).controlled_by(uid)
        and meta.name not in needed_names
        and meta.labels.attempt not in running_attempts
        and not meta.terminating
    )
    is_over = job.status.phase in TERMINAL or any(
        find_end(job.status.attempts, attempt_of(child)) for child in latest
    )
    ended_jobs = (*gang.child_jobs, *gang.worker_jobs) if is_over else gang.child_jobs[:-1]
    suspended_jobs = (child for child in ended_jobs if child.spec.suspend)
    return (
        *group_deletes,
        *(delete_job(child) for child in suspended_jobs if may_create_pods(child)),
    )


def waiting_reason(gang: ObservedGang) -> Reason | None:
    """Return why the gang scheduler does not start the present gang."""
    child = gang.current_job.metadata
    for group in gang.groups:
        meta = group.object.metadata
        if meta.name == child.name or meta.controlled_by(child.uid):
            why = _refusal(group.object)
            if why is not None:
                return Reason(why.reason, sentence(f"{group.kind.kind} {meta.name}: {why.message}"))
    return None


def find_admitter(child: Job) -> GangScheduler | None:
    """Return the gang scheduler that admits the child Job by resuming it; None without one."""
    return _ADMITTERS.get(child.metadata.annotations.gang)


def _refusal(group: SchedulingGroup) -> Reason | None:
    conditions = (*group.status.conditions, *group.status.scheduling_conditions)
    refusals = (c for c in conditions if c.message and (c.type, c.status) in _REFUSALS)
    return next((Reason("GangUnschedulable", c.message) for c in refusals), None)
