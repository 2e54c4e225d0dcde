"""The monotonic clock includes the time of suspension, and API times have whole seconds."""

import time
from datetime import UTC, datetime

import pytest

from torchrun_controller.clock import SYSTEM, Clock


def test_second_drops_microseconds() -> None:
    clock = Clock(wall=lambda: datetime(2026, 1, 2, 3, 4, 5, 999_999, tzinfo=UTC))
    assert clock.second() == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_wall_is_the_current_time_in_utc() -> None:
    before, wall, after = datetime.now(UTC), SYSTEM.wall(), datetime.now(UTC)
    assert before <= wall <= after
    assert wall.tzinfo is UTC


def test_jitter_is_random_from_0_to_1() -> None:
    values = {SYSTEM.jitter() for _ in range(100)}
    assert len(values) > 1
    assert all(0 <= value < 1 for value in values)


@pytest.mark.parametrize("name", ["CLOCK_BOOTTIME", "CLOCK_MONOTONIC"])
def test_monotonic_runs_while_the_machine_is_suspended_if_the_platform_can(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 1001, raising=False)
    monkeypatch.setattr(time, "CLOCK_MONOTONIC", 1002)
    if name == "CLOCK_MONOTONIC":
        monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    monkeypatch.setattr(time, "clock_gettime", float)
    assert SYSTEM.monotonic() == getattr(time, name)
