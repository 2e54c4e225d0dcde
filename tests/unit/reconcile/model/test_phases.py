"""The transition table: complete, and terminal phases absorb."""

import pytest

from torchrun_controller.reconcile.model.phases import (
    PHASES,
    TERMINAL,
    TRANSITIONS,
    Finding,
    transition,
)


@pytest.mark.parametrize("finding", Finding)
@pytest.mark.parametrize("phase", [None, *PHASES])
def test_every_pair_has_its_row_and_terminal_phases_absorb(phase, finding):
    row = transition(phase, finding)
    if phase in TERMINAL:
        assert row is None
    else:
        assert row is not None
        assert row.phase in PHASES or finding is Finding.SUSPENDING


def test_the_table_holds_every_pair():
    assert set(TRANSITIONS) == {(phase, finding) for phase in PHASES for finding in Finding}


def test_success_and_failure_are_terminal():
    assert {"Succeeded", "Failed", "TimedOut"} == TERMINAL
    assert transition("Running", Finding.GANG_SUCCEEDED).phase == "Succeeded"
    assert transition("Running", Finding.GANG_FAILED).phase == "Failed"
