"""The tables of phases and states, and the generated page."""

import phases_page
import pytest

from torchrun_api.kinds.status import PHASES, TERMINAL, UNFINISHED, WAITING
from torchrun_controller.reconcile.job.running import gang_exists
from torchrun_controller.reconcile.job.steps import STEPS
from torchrun_controller.reconcile.model.phases import (
    GANG_PHASES,
    ROWS,
    TRANSITIONS,
    Hold,
    Pods,
    State,
)


def test_each_state_has_a_row_and_each_phase_a_state():
    assert set(ROWS) == set(State)
    assert {row.phase for row in ROWS.values()} - {None} == set(PHASES)


def test_time_counts_only_while_pods_and_admission_are_kept():
    running = [row for row in ROWS.values() if row.runs]
    assert {(row.admission, row.pods) for row in running} == {(Hold.KEPT, Pods.KEPT)}


def test_every_phase_is_reachable_by_steps_and_transitions():
    led_to = {phase for step in STEPS for phase in step.leads_to}
    assert led_to == set(PHASES) == set().union(*TRANSITIONS.values())


@pytest.mark.parametrize("phase", PHASES)
def test_terminal_phases_are_final_and_no_phase_follows_itself(phase):
    assert bool(TRANSITIONS[phase]) is (phase not in TERMINAL)
    assert phase not in TRANSITIONS[phase]


def test_phases_with_a_gang_are_those_of_the_step_for_an_existing_gang():
    step = next(step for step in STEPS if step.decide is gang_exists)
    assert set(step.leads_to) == GANG_PHASES


def test_waiting_phases_are_unfinished():
    assert set(WAITING) < set(UNFINISHED) == set(PHASES) - TERMINAL


def test_success_and_failure_are_terminal():
    assert {"Succeeded", "Failed", "TimedOut"} == TERMINAL
    assert ROWS[State.GANG_SUCCEEDED].phase == "Succeeded"
    assert ROWS[State.GANG_FAILED].phase == "Failed"


def test_the_page_is_that_of_the_tables():
    """`make generate` writes it again."""
    assert phases_page.PAGE.read_text() == phases_page.page()
