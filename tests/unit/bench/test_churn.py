"""Each side of the churn processes the same events."""

import pytest

from torchrun_bench.churn import measured

EVENTS = 800


@pytest.mark.long  # a comparison of CPU times
def test_the_floor_is_below_all_others() -> None:
    floor, ours = (measured(name, EVENTS) for name in ("floor", "controller"))
    assert floor.events == ours.events == EVENTS
    assert floor.bytes == ours.bytes
    assert floor.cpu_seconds < ours.cpu_seconds
