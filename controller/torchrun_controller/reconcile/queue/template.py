"""Whether jobs can be made of a queue's template: what CEL cannot see, the API server judges.

A sample Job, merged as for any worker, is sent as a dry run; the check stands in the condition
TemplateValid and is not asked for again until the spec changes.
"""

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.meta import Condition, ObjectMeta
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.child_job import (
    charge_annotation,
    child_job,
    worker_template,
)
from torchrun_controller.reconcile.queue.model import ObservedQueue, TemplateCheck
from torchrun_controller.reconcile.schedulers.choice import choose
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.resolve import resolve_spec

CONDITION = "TemplateValid"


class TemplateState(Struct, frozen=True):
    """The condition, or what has to be tried for it."""

    condition: ConditionUpdate | None = None
    trial: Apply | None = None


def check_template(observed: ObservedQueue, defaults: Defaults) -> TemplateState:
    """What is known of the template, or how to learn it."""
    queue = observed.queue
    if queue.invalid:
        return TemplateState(_condition("False", "InvalidSpec", queue.invalid))
    check = observed.template_check
    if check is not None and check.generation == queue.metadata.generation:
        return TemplateState(_of(check))
    known = _known(queue)
    if known is not None:
        return TemplateState(
            ConditionUpdate(CONDITION, known.status, Reason(known.reason, known.message))
        )
    try:
        choose(queue, observed.installed)
        return TemplateState(trial=sample(queue, defaults))
    except InvalidSpecError as error:
        return TemplateState(_condition("False", "InvalidSpec", str(error)))


def sample(queue: TorchrunQueue, defaults: Defaults) -> Apply:
    """The Job of one worker that a queue's template makes.

    Raises:
        InvalidSpecError: it makes none.
    """
    job = TorchrunJob(
        # Nothing is made, but the name must be free.
        metadata=ObjectMeta(
            name=f"template-{queue.metadata.uid[:8]}", namespace=queue.metadata.namespace
        ),
        spec=TorchrunJobSpec(
            job_queue=queue.metadata.name,
            num_nodes=1,
            command=("true",),
            # Jobs may bring their own.
            image=queue.spec.image or "image",
        ),
    )
    run = resolve_spec(job, queue)
    charged = charge_annotation(job, queue, run)
    template = worker_template(job, queue, run, None, 0, "0", defaults)
    template = merge(template, {"metadata": {"annotations": charged}} if charged else {})
    made = child_job(job, run, 0, template, charged)
    metadata = {
        "name": job.metadata.name,
        "namespace": job.metadata.namespace,
        "labels": {names.QUEUE_LABEL: names.label_value(queue.metadata.name)},
    }
    return replace(made, body={**made.body, "metadata": metadata})


def _of(check: TemplateCheck) -> ConditionUpdate:
    match check.accepted:
        case "True":
            return _condition(
                "True", "Accepted", "the API server takes a Job made from the template"
            )
        case "False":
            return _condition(
                "False", "Rejected", f"a Job made from it is refused: {check.message}"
            )
        case _:
            return _condition("Unknown", "NotJudged", f"it was not tried: {check.message}")


def _known(queue: TorchrunQueue) -> Condition | None:
    """A good check on the present spec, as it stands in the status; others are asked for anew."""
    return next(
        (
            condition
            for condition in queue.status.conditions
            if condition.type == CONDITION
            and condition.status == "True"
            and condition.observed_generation == queue.metadata.generation
        ),
        None,
    )


def _condition(status: str, reason: str, message: str) -> ConditionUpdate:
    assert status in ("True", "False", "Unknown")
    return ConditionUpdate(CONDITION, status, Reason(reason, message))  # type: ignore[arg-type]
