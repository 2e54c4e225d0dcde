"""The transition table: complete, and terminal phases absorb."""

import pytest

from torchrun_controller.reconcile.model.phases import (
    PHASES,
    TERMINAL,
    TRANSITIONS,
    State,
    transition,
)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("phase", [None, *PHASES])
def test_every_pair_has_its_row_and_terminal_phases_absorb(phase, state):
    row = transition(phase, state)
    if phase in TERMINAL:
        assert row is None
    else:
        assert row is not None
        assert row.phase in PHASES or state is State.SUSPENDING


def test_the_table_holds_every_pair():
    assert set(TRANSITIONS) == {(phase, state) for phase in PHASES for state in State}


def test_success_and_failure_are_terminal():
    assert {"Succeeded", "Failed", "TimedOut"} == TERMINAL
    assert transition("Running", State.GANG_SUCCEEDED).phase == "Succeeded"
    assert transition("Running", State.GANG_FAILED).phase == "Failed"
