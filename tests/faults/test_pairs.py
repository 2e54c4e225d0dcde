"""Random pairs of faults. TORCHRUN_FAULTS_SEED sets the seed, TORCHRUN_FAULTS_PAIRS the number."""

import os
import random
from collections.abc import Callable

import pytest

from faults import campaign
from faults.scenarios import SOUND

SEED = os.environ.get("TORCHRUN_FAULTS_SEED", "1")
PAIRS = int(os.environ.get("TORCHRUN_FAULTS_PAIRS", "10000"))
PARTS = 50


def drawn(part: int) -> list[campaign.Trial]:
    """The pairs of one part, with its own seed."""
    chance = random.Random(f"{SEED}/{part}")
    scenarios = sorted(SOUND)
    return [campaign.pair(chance.choice(scenarios), chance) for _ in range(PAIRS // PARTS)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_two_faults(part: int, record_property: Callable[[str, object], None]) -> None:
    print(f"seed {SEED}/{part}, {PAIRS // PARTS} pairs")
    wrong = 0
    for trial in drawn(part):
        problems = campaign.judge(trial)
        if problems:
            wrong += 1
            print(f"seed {SEED}, {campaign.shrunk(trial)}", *problems, sep="\n    ")
    record_property("pairs runs", PAIRS // PARTS)
    record_property("pairs wrong", wrong)
    assert not wrong, f"{wrong} went wrong, see above"
