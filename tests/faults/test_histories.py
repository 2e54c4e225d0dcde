"""Long random histories. TORCHRUN_FAULTS_SEED sets the seed, and hypothesis shrinks failures."""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from faults import histories
from faults.histories import ACTIONS, Step

SEED = int(os.environ.get("TORCHRUN_FAULTS_SEED", "1"))
HISTORIES = 500
PARTS = 20

STEPS = st.lists(
    st.builds(
        Step,
        after=st.sampled_from([0.0, 0.005, 0.5, 3.0, 12.0, 45.0]),
        action=st.sampled_from(ACTIONS),
        which=st.integers(0, 5),
    ),
    min_size=10,
    max_size=40,
)
STRIKES = st.dictionaries(st.integers(1, 600), st.integers(0, 29), max_size=12)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_histories(part: int, record_property: Callable[[str, object], None]) -> None:
    @seed(1000 * SEED + part)
    @settings(
        max_examples=HISTORIES // PARTS,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(steps=STEPS, strikes=STRIKES)
    def nothing_goes_wrong(steps: list[Step], strikes: dict[int, int]) -> None:
        assert histories.play(steps, strikes) == []

    record_property("histories runs", HISTORIES // PARTS)
    nothing_goes_wrong()
