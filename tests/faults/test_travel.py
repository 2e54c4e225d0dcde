"""Restarts with a stale API server. TORCHRUN_FAULTS_TRAVELS sets the number, TORCHRUN_FAULTS_SEED the
seed."""

import os
from collections.abc import Callable

import pytest

from faults import travel
from faults.test_planted import caches_are_trusted

SEED = os.environ.get("TORCHRUN_FAULTS_SEED", "1")
TRAVELS = int(os.environ.get("TORCHRUN_FAULTS_TRAVELS", "2000"))
PARTS = 20


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_time_travel(part: int, record_property: Callable[[str, object], None]) -> None:
    drawn = travel.journeys(TRAVELS, SEED)[part::PARTS]
    print(f"seed {SEED}, part {part}: {len(drawn)} runs")
    wrong = {str(journey): problems for journey in drawn if (problems := travel.judge(journey))}
    record_property("time travel runs", len(drawn))
    record_property("time travel wrong", len(wrong))
    for journey, problems in wrong.items():
        print(journey, *problems, sep="\n    ")
    assert not wrong, f"{len(wrong)} went wrong, see above"


@pytest.mark.parametrize("journey", travel.REGRESSIONS, ids=str)
def test_regressions(journey: travel.Journey) -> None:
    assert travel.judge(journey) == []


@pytest.mark.timeout(600)
def test_the_control_trusted_caches_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [j for j in travel.journeys(10_000, SEED) if j.scenario == "restart"]
    caches_are_trusted(monkeypatch)
    wrong = next((problems for journey in drawn if (problems := travel.judge(journey))), [])
    print(*wrong[:5], sep="\n")
    assert wrong, "no run detects the bug"
