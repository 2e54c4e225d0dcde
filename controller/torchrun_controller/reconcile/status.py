"""The status of a job: phase, conditions, counts and the line for the Reason column."""

from datetime import datetime

from msgspec.structs import replace
from torchrun_api.queue import TorchrunQueueSpec
from torchrun_api.unsupported import not_yet_supported

from torchrun_api.job import TorchrunJobStatus
from torchrun_api.meta import Condition
from torchrun_controller.reconcile import gang
from torchrun_controller.reconcile.conditions import Claimed, update
from torchrun_controller.reconcile.decision import Decision
from torchrun_controller.reconcile.observed import Observed
from torchrun_controller.reconcile.phases import TERMINAL, Finding, Row
from torchrun_controller.reconcile.plan import Event
from torchrun_controller.reconcile.workers import Why, count, precedence, root_cause, scheduled

# Findings, and reasons of a waiting gang, that somebody has to do something about.
TROUBLE = frozenset(
    {
        Finding.GANG_FAILED,
        Finding.GANG_ENDING,
        Finding.QUEUE_MISSING,
        Finding.SPEC_INVALID,
        Finding.NAME_TAKEN,
        Finding.REJECTED,
        Finding.WORKSPACE_REFUSED,
    }
)
TROUBLE_REASONS = frozenset({"Unschedulable", "ImagePullFailed", "ClaimPending", "JobSuspended"})


def compose(observed: Observed, decision: Decision, row: Row, now: datetime) -> TorchrunJobStatus:
    """The status that tells what was decided."""
    job, present = observed.job, observed.job.status
    nodes = decision.run.size.nodes if decision.run else present.num_nodes or 0
    if observed.child_jobs:
        nodes = gang.nodes_of(observed.child_jobs[-1])
    has_gang = bool(observed.child_jobs) or decision.finding is Finding.READY
    workers = count(observed.workers, nodes) if has_gang else present.workers
    started = row.phase in ("Running", "Succeeded")
    return TorchrunJobStatus(
        phase=row.phase,
        observed_generation=job.metadata.generation,
        reason=decision.why.reason,
        message=decision.why.message,
        conditions=_by_type(
            update(
                present.conditions,
                _conditions(observed, decision, row, nodes),
                job.metadata.generation,
                now,
            )
        ),
        num_nodes=nodes or None,
        gpus=decision.run.size.gpus if decision.run else present.gpus,
        workers=workers,
        workers_status=f"{workers.ready}/{nodes} ready" if workers else "",
        attempt=decision.attempt,
        start_time=present.start_time or (now if started else None),
        completion_time=now if row.phase in TERMINAL else None,
        last_failure=root_cause(observed.workers) or present.last_failure,
    )


def ordered(status: TorchrunJobStatus) -> TorchrunJobStatus:
    """The status with its conditions by type: the API server keeps no order of a map list."""
    return replace(status, conditions=_by_type(status.conditions))


def _by_type(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    return tuple(sorted(conditions, key=lambda condition: condition.type))


def _conditions(observed: Observed, decision: Decision, row: Row, nodes: int) -> list[Claimed]:
    """What is claimed now, over what was claimed before and is not contradicted."""
    claims = {
        c.type: Claimed(c.type, c.status, Why(c.reason, c.message))
        for c in observed.job.status.conditions
        if c.type != "NotYetSupported"
    }
    if decision.queue is not None:
        _claim(claims, "QueueReady", holds=True, why=decision.queue)
    if decision.workspace is not None:
        _claim(claims, "WorkspaceReady", holds=True, why=decision.workspace)
    if observed.child_jobs:
        placed = scheduled(observed.workers)
        reason = "WorkersScheduled" if placed == nodes else "WorkersWaiting"
        why = Why(reason, f"{placed} of {nodes} workers have a node")
        _claim(claims, "Scheduled", holds=placed == nodes, why=why)
    if row.phase in TERMINAL:
        _claim(claims, "Running", holds=False, why=Why("Ended", "the run has ended"))
    claims[row.condition] = Claimed(row.condition, row.status, decision.why)
    template = observed.queue.spec if observed.queue else TorchrunQueueSpec()
    fields = not_yet_supported(observed.job.spec, template)
    if fields:
        message = "accepted, but not acted on yet: " + "; ".join(fields)
        _claim(claims, "NotYetSupported", holds=True, why=Why("FieldsNotHonoured", message))
    return list(claims.values())


def _claim(claims: dict[str, Claimed], kind: str, *, holds: bool, why: Why) -> None:
    claims[kind] = Claimed(kind, "True" if holds else "False", why)


def refine(observed: Observed) -> TorchrunJobStatus | None:
    """A failed job learns a better root cause from pods that end after the first one did."""
    present = observed.job.status
    if present.phase != "Failed" or not observed.child_jobs:
        return None
    cause = root_cause(observed.workers)
    known = present.last_failure
    if cause is None or (known is not None and precedence(known) <= precedence(cause)):
        return None
    why = gang.why_failed(cause)
    conditions = tuple(
        replace(c, reason=why.reason, message=why.message) if c.type == "Failed" else c
        for c in present.conditions
    )
    return replace(
        present,
        last_failure=cause,
        reason=why.reason,
        message=why.message,
        conditions=conditions,
    )


def events(before: TorchrunJobStatus, decision: Decision, row: Row) -> tuple[Event, ...]:
    """One event at each change of phase or reason."""
    why, finding = decision.why, decision.finding
    if before.phase == row.phase and before.reason == why.reason:
        return ()
    trouble = finding in TROUBLE or why.reason in TROUBLE_REASONS
    made = [Event("Warning" if trouble else "Normal", why.reason, why.message)]
    rendezvous = decision.run.rendezvous if decision.run else None
    if finding is Finding.READY and rendezvous is not None and rendezvous.fallback_from:
        made.append(
            Event(
                "Warning",
                "RendezvousFallback",
                f"rdzvBackend {rendezvous.fallback_from} needs distributed.rdzvEndpoint"
                f" (etcd's v2 API ended with etcd 3.5); {rendezvous.backend} is used instead",
            )
        )
    return tuple(made)
