"""Every single fault, at every request and at every event of every reference scenario."""

import pytest

from faults import campaign
from faults.faults import OF_EVENTS, OF_REQUESTS
from faults.scenarios import SCENARIOS

LEAST = 2_400


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_faults_nothing_is_wrong(scenario: str) -> None:
    assert campaign.without_faults(scenario).wrong == []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_runs_are_alike(scenario: str) -> None:
    again = campaign.simulate(SCENARIOS[scenario])
    once = campaign.without_faults(scenario)
    assert (again.points, again.state, again.seconds) == (once.points, once.state, once.seconds)


def test_there_are_enough_of_them() -> None:
    count = sum(len(campaign.kinds_at(p)) for name in SCENARIOS for p in campaign.points(name))
    print(f"{count} single faults")
    assert count >= LEAST


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*OF_REQUESTS, *OF_EVENTS])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_fault(scenario: str, kind: str) -> None:
    wrong = {
        str(trial): found
        for trial in campaign.singles(scenario, kind)
        if (found := campaign.judge(trial))
    }
    for trial, found in wrong.items():
        print(trial, *found, sep="\n    ")
    assert not wrong, f"{len(wrong)} went wrong, see above"
