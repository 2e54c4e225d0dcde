"""From the child Job to the child Job and its group, as the chosen scheduler wants them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torchrun_api import names
from torchrun_api.admission import GangScheduling
from torchrun_api.json import JsonObject
from torchrun_controller.reconcile.merge import merge
from torchrun_controller.reconcile.observed import Observed
from torchrun_controller.reconcile.plan import Apply
from torchrun_controller.reconcile.run import Run
from torchrun_controller.reconcile.schedulers import coscheduling, kai, kueue, native, none, volcano
from torchrun_controller.reconcile.schedulers.binding import Binding, Gang
from torchrun_controller.reconcile.schedulers.choice import Choice, choose
from torchrun_controller.reconcile.schedulers.installed import Installed

WAYS: Mapping[GangScheduling, Callable[[Gang], Binding]] = MappingProxyType(
    {
        "kai": kai.bind,
        "volcano": volcano.bind,
        "coscheduling": coscheduling.bind,
        "native": native.bind,
        "kueue": kueue.bind,
        "none": none.bind,
    }
)


def bind(observed: Observed, run: Run, attempt: int, made: Apply) -> tuple[Apply, ...]:
    """The groups of a gang, and then its child Job: a scheduler must know a pod's group first.

    Raises:
        InvalidSpecError: what is asked for cannot be said to this scheduler.
    """
    choice, body = _choose(observed), made.body
    spec = _object(body, "spec")
    template = _object(spec, "template")
    binding = _binding(observed, run, attempt, made.name, template, choice)
    template = merge(_named(template, choice), binding.template)
    job = merge({**body, "spec": {**spec, "template": template}}, binding.job)
    if choice.gang != "none":
        job = merge(job, {"metadata": {"annotations": {names.GANG_SCHEDULER: choice.gang}}})
    return (*binding.groups, Apply(made.kind, job))


def unasked(observed: Observed) -> str:
    """Why pods cannot ask the gang's scheduler for room; "" if they can."""
    choice = _choose(observed)
    if choice.missing is not None:
        return choice.missing.message
    if choice.gang == "kueue":
        # A pod by itself asks the nodes, not Kueue: a larger gang might wait where this one runs.
        return "Kueue tells nobody of room: suspend and resume the job to ask it for all nodes"
    return ""


def probing(observed: Observed, run: Run, template: JsonObject, probe: JsonObject) -> JsonObject:
    """A pod that asks the gang's scheduler for room for one worker of this template.

    Raises:
        InvalidSpecError: what is asked for cannot be said to this scheduler.
    """
    choice = _choose(observed)
    name = observed.job.metadata.name
    binding = _binding(observed, run, 0, name, template, choice)
    return merge(_named(probe, choice), binding.probe)


def _choose(observed: Observed) -> Choice:
    assert observed.queue is not None
    return choose(observed.queue, observed.installed, observed.job)


def _binding(
    observed: Observed, run: Run, attempt: int, name: str, template: JsonObject, choice: Choice
) -> Binding:
    job, queue = observed.job, observed.queue
    assert queue is not None
    elastic = job.spec.elastic
    gang = Gang(
        job=job,
        queue=queue,
        name=name,
        attempt=attempt,
        nodes=run.size.nodes,
        least=min(run.size.nodes, elastic.min_nodes) if elastic else run.size.nodes,
        template=template,
        topology=job.spec.scheduling.topology or queue.spec.scheduling.topology,
        installed=observed.installed or Installed(),
    )
    return WAYS[choice.gang](gang)


def _named(template: JsonObject, choice: Choice) -> JsonObject:
    return merge(
        template, {"spec": {"schedulerName": choice.scheduler}} if choice.scheduler else {}
    )


def _object(body: JsonObject, name: str) -> JsonObject:
    value = body[name]
    assert isinstance(value, dict)
    return value
