"""The Jobs of the next attempt, with what they remember of the attempts before it."""

import msgspec

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.status import Attempt
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.child_job import (
    charge,
    child_job,
    wanted_nodes,
    worker_template,
)
from torchrun_controller.reconcile.objects.environment import Environment
from torchrun_controller.reconcile.placement.affinity import prefer
from torchrun_controller.reconcile.placement.local import prefer_local
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, of_head
from torchrun_controller.reconcile.workspace.reload import marked

AVOIDED = 100  # weight of the wish for other nodes


def roles_of(run: ResolvedSpec) -> tuple[str, ...]:
    """Return the roles of the Jobs of a gang. The head is the last, see `head_and_workers`."""
    return ("",) if run.size.head is None else (names.WORKER, names.HEAD)


def child_jobs(
    observed: Observed,
    run: ResolvedSpec,
    attempt: int,
    defaults: Defaults,
    *,
    counts: Counts,
    ended: Attempt | None,
    may_start: bool,
    environment: Environment | None,
    avoided: tuple[str, ...],
) -> tuple[Apply, ...]:
    """The Jobs of one attempt, with their pods' preferences for nodes.

    What was counted until now and how the gang before it ended stand in their annotations, so that
    nothing is lost or counted twice if the status is not written. Unless `may_start`, the ranks
    wait for the annotation torchrun.ai/start of their pods, as they do wherever there is a head: it
    comes when both Jobs are there. Nodes with the `avoided` hostnames are taken last.

    Raises:
        InvalidSpecError: as of `worker_template`.
    """
    job, queue = observed.job, observed.queue
    assert queue is not None
    charged, made = charge(job, queue, run), []
    for role in roles_of(run):
        own = of_head(run, job, queue) if role == names.HEAD else run
        start = str(attempt) if may_start and not role else ""
        template = worker_template(job, queue, own, environment, attempt, start, defaults, role)
        template = merge(template, {"metadata": {"annotations": charged}} if charged else {})
        template = prefer_local(prefer(template, "NotIn", avoided, AVOIDED), observed, own)
        annotations = _memory(attempt, counts, ended) | wanted_nodes(job, own) | charged
        made.append(child_job(job, own, attempt, marked(template, observed), annotations, role))
    return tuple(made)


def _memory(attempt: int, counts: Counts, ended: Attempt | None) -> JsonObject:
    """What must outlive a status that is never written."""
    made: JsonObject = {}
    if attempt:
        made = {names.RESTARTS: str(counts.restarts), names.DISRUPTIONS: str(counts.disruptions)}
    if attempt and ended is not None:
        made[names.CAUSE] = msgspec.json.encode(ended).decode()
    return made
