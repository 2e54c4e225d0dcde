"""The Jobs of the next attempt, with the history of the attempts in their annotations."""

import msgspec

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.status import Attempt
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.child_job import (
    child_job,
    worker_template,
)
from torchrun_controller.reconcile.objects.environment import Environment
from torchrun_controller.reconcile.placement.affinity import add_preference
from torchrun_controller.reconcile.placement.local import (
    nodes_with_checkpoints,
    prefer_checkpoint_nodes,
)
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, of_head
from torchrun_controller.reconcile.workspace.reload import annotate_template

AVOIDANCE_WEIGHT = 100


def roles_of(run: ResolvedSpec) -> tuple[str, ...]:
    """Return the roles of the Jobs of a gang. The head is the last, see `head_and_workers`."""
    return ("",) if run.size.head is None else (names.WORKER, names.HEAD)


def build_child_jobs(
    observed: Observed,
    run: ResolvedSpec,
    attempt: int,
    defaults: Defaults,
    *,
    counts: Counts,
    previous_end: Attempt | None,
    shrunk_from: int | None,
    may_start: bool,
    environment: Environment | None,
    avoided_hostnames: tuple[str, ...],
) -> tuple[Apply, ...]:
    """Return the Jobs of one attempt, with the node preferences of their pods.

    `counts`, `previous_end` and `shrunk_from` become annotations: nothing is lost or counted twice
    if the status write fails. With `may_start` the ranks start at once. Without it, and always in a
    gang with a head, they wait for the annotation torchrun.ai/start of their pods.

    Raises:
        InvalidSpecError: as `worker_template` does.
    """
    job, queue = observed.job, observed.queue
    assert queue is not None
    jobs = []
    checkpoint_nodes = nodes_with_checkpoints(job, observed.gang)
    for role in roles_of(run):
        role_spec = of_head(run, job, queue) if role == names.HEAD else run
        start = str(attempt) if may_start and not role else ""
        template = worker_template(
            job, queue, role_spec, environment, attempt, start, defaults, role
        )
        template = add_preference(template, "NotIn", avoided_hostnames, AVOIDANCE_WEIGHT)
        template = prefer_checkpoint_nodes(template, role_spec, checkpoint_nodes, observed.cluster)
        template = annotate_template(template, observed.job, observed.workspace)
        annotations = _history(attempt, counts, previous_end)
        annotations[names.GENERATION] = str(job.metadata.generation)
        if shrunk_from is not None:
            annotations[names.WANTED_NODES] = str(shrunk_from)
        jobs.append(child_job(job, role_spec, attempt, template, annotations, role))
    return tuple(jobs)


def _history(attempt: int, counts: Counts, previous_end: Attempt | None) -> JsonObject:
    """Return the annotations with the facts that a lost status write must not lose."""
    annotations: JsonObject = {}
    if attempt:
        annotations = {
            names.RESTARTS: str(counts.restarts),
            names.DISRUPTIONS: str(counts.disruptions),
        }
    if attempt and previous_end is not None:
        annotations[names.CAUSE] = msgspec.json.encode(previous_end).decode()
    return annotations
