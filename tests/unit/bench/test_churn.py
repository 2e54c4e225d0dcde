"""The bench without an API server: it detects a planted slow-down."""

import asyncio

import pytest

from torchrun_bench.churn import measured, side
from torchrun_bench.planted import slowed

EVENTS = 800
ROUNDS = 15  # short and in turn, so that other load affects both sides


@pytest.mark.long  # a ratio of CPU times, which other load distorts
def test_a_planted_slow_down_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1.0: 0.0, 2.0: 0.0}
    for _ in range(ROUNDS):
        for factor in seconds:
            monkeypatch.setattr(asyncio.Handle, "_run", slowed(factor))
            seconds[factor] += side("controller", EVENTS, factor).cpu_seconds
            monkeypatch.undo()
    assert 1.5 < seconds[2.0] / seconds[1.0] < 2.7


def test_the_floor_is_below_all_others() -> None:
    floor, ours = (measured(name, EVENTS, 0.0) for name in ("floor", "controller"))
    assert floor.events == ours.events == EVENTS
    assert floor.bytes == ours.bytes
    assert floor.cpu_seconds < ours.cpu_seconds
