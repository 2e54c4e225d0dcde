"""Checks whether jobs can be created from a queue's template.

The API server validates what CEL cannot: a sample Job, merged like that of any worker, is sent as a
dry run. The condition TemplateValid stores the result until the spec changes.
"""

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.meta import Condition, ObjectMeta
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.child_job import (
    child_job,
    worker_template,
)
from torchrun_controller.reconcile.queue.model import ObservedQueue, TemplateCheck
from torchrun_controller.reconcile.schedulers.choice import choose
from torchrun_controller.reconcile.spec import pod_template
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import resolve

CONDITION = "TemplateValid"


class TemplateState(Struct, frozen=True):
    """The condition, or the dry run that decides it."""

    condition: ConditionUpdate | None = None
    trial: Apply | None = None


def check_template(observed: ObservedQueue, defaults: Defaults) -> TemplateState:
    """Return the condition of the template, or the dry run that is missing for it."""
    queue = observed.queue
    if queue.invalid:
        return TemplateState(_condition("False", "InvalidSpec", queue.invalid))
    check = observed.template_check
    if check is not None and check.generation == queue.metadata.generation:
        return TemplateState(_check_condition(check))
    condition = _stored_condition(queue)
    if condition is not None:
        return TemplateState(
            ConditionUpdate(
                CONDITION, condition.status, Reason(condition.reason, condition.message)
            )
        )
    try:
        pod_template.check(queue)
        choose(queue, observed.installed)
        return TemplateState(trial=sample_job(queue, defaults))
    except InvalidSpecError as error:
        return TemplateState(_condition("False", "InvalidSpec", str(error)))


def sample_job(queue: TorchrunQueue, defaults: Defaults) -> Apply:
    """Build the Job of one worker from a queue's template.

    Raises:
        InvalidSpecError: no Job can be built from the template.
    """
    job = TorchrunJob(
        # The dry run creates nothing, but the name must be free.
        metadata=ObjectMeta(
            name=f"template-{queue.metadata.uid[:8]}", namespace=queue.metadata.namespace
        ),
        spec=TorchrunJobSpec(
            job_queue=queue.metadata.name,
            num_nodes=1,
            command=("true",),
            # The queue may leave the image to its jobs.
            image=queue.spec.image or "image",
        ),
    )
    spec = resolve(job, queue)
    template = worker_template(job, queue, spec, None, 0, "0", defaults)
    apply = child_job(job, spec, 0, template, {})
    metadata = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    return replace(apply, body={**apply.body, "metadata": metadata})


def _check_condition(check: TemplateCheck) -> ConditionUpdate:
    match check.accepted:
        case "True":
            return _condition(
                "True", "Accepted", "The API server accepts a Job created from the template."
            )
        case "False":
            return _condition(
                "False",
                "Rejected",
                f"The API server rejects a Job created from the template: {check.message}",
            )
        case _:
            return _condition(
                "Unknown", "NotChecked", f"The template is not checked yet: {check.message}"
            )


def _stored_condition(queue: TorchrunQueue) -> Condition | None:
    """Return a positive result for the present spec from the status; others are tried again."""
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
