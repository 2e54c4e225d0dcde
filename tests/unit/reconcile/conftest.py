"""Checks every decision of every test against the tables of steps and phases."""

import functools
from collections.abc import Callable, Iterator

import pytest

from torchrun_api.kinds.resources import JOBS
from torchrun_controller.reconcile.job import steps
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.job.decisions import Decision
from torchrun_controller.reconcile.job.status import OWN_CONDITIONS
from torchrun_controller.reconcile.job.steps import Step
from torchrun_controller.reconcile.model.phases import ROWS, TRANSITIONS, Pods
from torchrun_controller.reconcile.model.plan import Plan


def checked_step(step: Step) -> Step:
    """Wrap the step: its decisions must lead to its declared phases."""

    @functools.wraps(step.decide)
    def decide(assessment: Assessment) -> Decision | Plan | None:
        decision = step.decide(assessment)
        if isinstance(decision, Decision):
            row = ROWS[decision.state]
            phase = row.phase
            if row.pods is Pods.KEPT and assessment.gang and assessment.end is None:
                gone = {write.name for write in decision.writes.deletes if write.kind is JOBS}
                assert assessment.observed.gang.current_job.metadata.name not in gone, (
                    decision.state
                )
            assert phase is None or phase in step.leads_to, (step.decide.__name__, decision.state)
        return decision

    return Step(decide, step.leads_to)


def checked_transition(
    original: Callable[[Assessment], Decision | Plan],
) -> Callable[[Assessment], Decision | Plan]:
    """Wrap the decision: its phase must be a valid transition."""

    def first_decision(assessment: Assessment) -> Decision | Plan:
        decision, observed = original(assessment), assessment.observed
        if isinstance(decision, Plan):
            return decision
        before = observed.job.status.phase or "Pending"
        after = ROWS[decision.state].phase or before
        # A gang is created in Queued. The status with that phase may be lost.
        gang_phases = TRANSITIONS["Queued"] if observed.gang.child_jobs else frozenset()
        allowed = {before} | TRANSITIONS[before] | gang_phases
        assert after in allowed, (before, decision.state)
        return decision

    return first_decision


def checked_plan(original: Callable[..., Plan]) -> Callable[..., Plan]:
    """Wrap the plan: it has no condition of another manager."""

    def plan(assessment: Assessment, decision: Decision) -> Plan:
        planned = original(assessment, decision)
        types = {c.type for c in planned.status.conditions} if planned.status else set()
        assert types <= OWN_CONDITIONS, types - OWN_CONDITIONS
        return planned

    return plan


@pytest.fixture(autouse=True, scope="session")
def _every_decision_is_checked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "STEPS", tuple(checked_step(step) for step in steps.STEPS))
        patch.setattr(steps, "first_decision", checked_transition(steps.first_decision))
        patch.setattr(steps, "plan", checked_plan(steps.plan))
        yield
