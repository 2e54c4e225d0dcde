"""From the child Job to the child Job and its group, as the chosen scheduler wants them."""

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.schedulers.choice import Choice, choose
from torchrun_controller.reconcile.schedulers.scheduler import Gang, GangObjects
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec


def build_gang_objects(
    observed: Observed, run: ResolvedSpec, attempt: int, made: tuple[Apply, ...]
) -> tuple[Apply, ...]:
    """The groups of a gang, and then its Jobs: a scheduler must know a pod's group first.

    The gang is known by the name of the last of these.

    Raises:
        InvalidSpecError: what is asked for cannot be said to this scheduler.
    """
    choice = _choose(observed)
    templates = [_object(_object(one.body, "spec"), "template") for one in made]
    gang = _gang(observed, run, attempt, made[-1].name, *templates)
    build = SCHEDULERS[choice.gang].build
    bindings = [build(replace(gang, template=template)) for template in templates]
    jobs = (_bound(one, binding, choice) for one, binding in zip(made, bindings, strict=True))
    return (*bindings[0].groups, *jobs)


def _bound(made: Apply, binding: GangObjects, choice: Choice) -> Apply:
    body = made.body
    spec = _object(body, "spec")
    template = merge(_named(_object(spec, "template"), choice), binding.template)
    job = merge({**body, "spec": {**spec, "template": template}}, binding.job)
    if choice.gang != "none":
        job = merge(job, {"metadata": {"annotations": {names.GANG_SCHEDULER: choice.gang}}})
    return Apply(made.kind, job)


def unasked(observed: Observed) -> str:
    """Why pods cannot ask the gang's scheduler for room; "" if they can."""
    choice = _choose(observed)
    if choice.missing is not None:
        return choice.missing.message
    if choice.gang == "kueue":
        # A pod by itself asks the nodes, not Kueue: a larger gang might wait where this one runs.
        return "Kueue tells nobody of room: suspend and resume the job to ask it for all nodes"
    return ""


def probing(
    observed: Observed, run: ResolvedSpec, template: JsonObject, probe: JsonObject
) -> JsonObject:
    """A pod that asks the gang's scheduler for room for one worker of this template.

    Raises:
        InvalidSpecError: what is asked for cannot be said to this scheduler.
    """
    choice = _choose(observed)
    binding = SCHEDULERS[choice.gang].build(
        _gang(observed, run, 0, observed.job.metadata.name, template)
    )
    return merge(_named(probe, choice), binding.probe)


def _choose(observed: Observed) -> Choice:
    assert observed.queue is not None
    return choose(observed.queue, observed.cluster.installed, observed.job)


def _gang(
    observed: Observed,
    run: ResolvedSpec,
    attempt: int,
    name: str,
    template: JsonObject,
    *heads: JsonObject,
) -> Gang:
    """The gang with pods of this template, and of a head's where that has a Job of its own."""
    job, queue = observed.job, observed.queue
    assert queue is not None
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
        installed=observed.cluster.installed or Installed(),
    )


def _named(template: JsonObject, choice: Choice) -> JsonObject:
    return merge(
        template, {"spec": {"schedulerName": choice.scheduler}} if choice.scheduler else {}
    )


def _object(body: JsonObject, name: str) -> JsonObject:
    value = body[name]
    assert isinstance(value, dict)
    return value
