"""When a soak test calls memory flat."""

import random

import pytest

from soak import memory
from soak.memory import EVERY, Sample


def hour(growth: float, *, noise: float = 0.5, seed: int = 1) -> list[Sample]:
    """Samples of one hour in which memory grows by some MiB, with correlated noise."""
    chance, wave, samples = random.Random(seed), 0.0, []
    for number in range(round(3600 / EVERY)):
        at = number * EVERY
        wave = 0.9 * wave + chance.gauss(0, noise)
        samples.append(Sample(at, 60 + growth * at / 3600 + wave, 20))
    return samples


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_flat(seed: int) -> None:
    assert memory.trend(hour(0, seed=seed)).is_flat


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_not_flat(seed: int) -> None:
    assert not memory.trend(hour(6, seed=seed)).is_flat


def test_the_interval_holds_the_truth_most_of_the_time() -> None:
    trends = [memory.trend(hour(6, seed=seed)) for seed in range(40)]
    assert sum(each.low < 6 < each.high for each in trends) >= 34


def test_memory_that_shrinks_is_flat() -> None:
    assert memory.trend(hour(-6)).is_flat


def test_the_first_sixth_does_not_count() -> None:
    samples = hour(0)
    grown = [s._replace(mib=s.mib - 20) if s.at < 500 else s for s in samples]
    assert memory.trend(grown) == memory.trend(samples)
