"""Whether jobs can be made of a queue's template: what CEL cannot see, the API server judges.

A sample Job, merged as for any worker, is sent as a dry run; the verdict stands in the condition
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
from torchrun_controller.reconcile.objects.child_job import charge, child_job, worker_template
from torchrun_controller.reconcile.queues.observed import ObservedQueue, Verdict
from torchrun_controller.reconcile.schedulers.choice import choose
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.resolve import resolve_spec

CONDITION = "TemplateValid"


class Judged(Struct, frozen=True):
    """The condition, or what has to be tried for it."""

    claim: ConditionUpdate | None = None
    trial: Apply | None = None


def judge(observed: ObservedQueue, defaults: Defaults) -> Judged:
    """What is known of the template, or how to learn it."""
    queue = observed.queue
    if queue.invalid:
        return Judged(_claim("False", "InvalidSpec", queue.invalid))
    verdict = observed.verdict
    if verdict is not None and verdict.generation == queue.metadata.generation:
        return Judged(_of(verdict))
    known = _known(queue)
    if known is not None:
        return Judged(ConditionUpdate(CONDITION, known.status, Reason(known.reason, known.message)))
    try:
        choose(queue, observed.installed)
        return Judged(trial=sample(queue, defaults))
    except InvalidSpecError as error:
        return Judged(_claim("False", "InvalidSpec", str(error)))


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
    charged = charge(job, queue, run)
    template = worker_template(job, queue, run, None, 0, "0", defaults)
    template = merge(template, {"metadata": {"annotations": charged}} if charged else {})
    made = child_job(job, run, 0, template, charged)
    metadata = {
        "name": job.metadata.name,
        "namespace": job.metadata.namespace,
        "labels": {names.QUEUE_LABEL: names.label_value(queue.metadata.name)},
    }
    return replace(made, body={**made.body, "metadata": metadata})


def _of(verdict: Verdict) -> ConditionUpdate:
    match verdict.accepted:
        case "True":
            return _claim("True", "Accepted", "the API server takes a Job made from the template")
        case "False":
            return _claim("False", "Rejected", f"a Job made from it is refused: {verdict.message}")
        case _:
            return _claim("Unknown", "NotJudged", f"it was not tried: {verdict.message}")


def _known(queue: TorchrunQueue) -> Condition | None:
    """A good verdict on the present spec, as it stands in the status; others are asked for anew."""
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


def _claim(status: str, reason: str, message: str) -> ConditionUpdate:
    assert status in ("True", "False", "Unknown")
    return ConditionUpdate(CONDITION, status, Reason(reason, message))  # type: ignore[arg-type]
