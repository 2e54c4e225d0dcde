"""Every single fault at every request and event of every reference scenario."""

from collections.abc import Callable

import pytest

from faults import campaign
from faults.points import POINTS, SLACK
from faults.scenarios import SCENARIOS, SOUND

Record = Callable[[str, object], None]
MARKED = [
    pytest.param(name, marks=pytest.mark.xfail(reason=each.known, strict=True))
    if each.known
    else name
    for name, each in SCENARIOS.items()
]


@pytest.mark.parametrize("scenario", MARKED)
def test_without_faults_nothing_is_wrong(scenario: str) -> None:
    assert campaign.without_faults(scenario).wrong == []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_runs_are_alike(scenario: str) -> None:
    again = campaign.simulate(SCENARIOS[scenario])
    once = campaign.without_faults(scenario)
    assert (again.points, again.state, again.seconds) == (once.points, once.state, once.seconds)


def test_the_number_of_points() -> None:
    assert POINTS.keys() == SCENARIOS.keys()
    found = {name: len(campaign.points(name)) for name in SCENARIOS}
    others = {
        name: f"{count}, pinned: {POINTS[name]}"
        for name, count in found.items()
        if abs(count - POINTS[name]) > max(3, SLACK * POINTS[name])
    }
    assert not others, "see tests/faults/points.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", campaign.KINDS)
@pytest.mark.parametrize("scenario", SOUND)
def test_one_fault(scenario: str, kind: str, record_property: Record) -> None:
    trials = list(campaign.singles(scenario, kind))
    wrong = {str(trial): found for trial in trials if (found := campaign.judge(trial))}
    record_property("singles runs", len(trials))
    record_property("singles wrong", len(wrong))
    for trial, found in wrong.items():
        print(trial, *found, sep="\n    ")
    assert not wrong, f"{len(wrong)} went wrong, see above"
