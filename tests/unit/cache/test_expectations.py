"""Read-your-writes: an owner waits for the caches, but not forever."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchrun_api.kinds.resources import JOBS, PODS, SERVICES, Kind
from torchrun_controller.cache.expectations import EXPECTATION_TIMEOUT, Expectations
from torchrun_controller.client.apply import WriteResult
from torchrun_controller.watch import CLIENT_GO

KINDS: dict[str, Kind[Any]] = {"jobs.batch": JOBS, "pods": PODS}


class Cache:
    def __init__(self, version: int = 0) -> None:
        self.resource_version = version


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def world() -> tuple[Expectations[str], dict[str, Cache], Clock]:
    caches, clock = {name: Cache() for name in KINDS}, Clock()
    return Expectations(lambda _: caches, clock, timeout=10), caches, clock


def written(resource: str, version: int) -> WriteResult:
    return WriteResult(KINDS[resource], "x", "u", str(version))


def test_an_owner_without_writes_is_never_behind() -> None:
    writes, _, _ = world()
    writes.expect("a", written("pods", 5))
    assert writes.behind("b") is None


def test_every_kind_must_be_reached() -> None:
    writes, caches, _ = world()
    writes.expect("a", written("pods", 5))
    writes.expect("a", written("jobs.batch", 7))
    caches["pods"].resource_version = 5
    assert writes.behind("a") is not None
    caches["jobs.batch"].resource_version = 8
    assert writes.behind("a") is None
    assert len(writes) == 0


def test_an_older_write_does_not_lower_the_mark() -> None:
    writes, caches, _ = world()
    writes.expect("a", written("pods", 9))
    writes.expect("a", written("pods", 5))
    caches["pods"].resource_version = 8
    assert writes.behind("a") is not None


def test_the_wait_has_a_timeout() -> None:
    writes, _, clock = world()
    writes.expect("a", written("pods", 5))
    clock.now += 9
    assert writes.behind("a") == 1
    clock.now += 1
    assert writes.behind("a") is None
    assert len(writes) == 0


def test_the_timeout_is_longer_than_a_dead_watch_takes_to_recover() -> None:
    """Otherwise a Job that the cache does not show yet counts as deleted, and a second gang starts."""
    noticed = CLIENT_GO.silence + 2 * CLIENT_GO.backoff
    assert noticed + 10 < EXPECTATION_TIMEOUT, "leaves time for a new list"


def test_writes_that_no_cache_shows_are_not_expected() -> None:
    writes, _, _ = world()
    writes.expect("a", None)
    writes.expect("a", WriteResult(SERVICES, "x", "u", "5"))
    writes.expect("a", WriteResult(PODS, "x", "u", ""))
    assert writes.behind("a") is None


@given(
    st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 30)), min_size=1),
    st.dictionaries(st.sampled_from(sorted(KINDS)), st.integers(0, 30)),
)
def test_behind_reports_unseen_writes(notes: list[tuple[str, int]], seen: dict[str, int]) -> None:
    writes, caches, _ = world()
    for expect in notes:
        writes.expect("a", written(*expect))
    for resource, version in seen.items():
        caches[resource].resource_version = version
    unseen = any(caches[resource].resource_version < version for resource, version in notes)
    assert (writes.behind("a") is not None) is unseen
