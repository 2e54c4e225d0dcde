"""Retries: back-off of failing keys, their overall rate, and Retry-After."""

import pytest

from torchrun_controller.rate_limit import Rate, RateLimit
from torchrun_controller.workqueue import WorkQueue
from unit.workqueue.draining import Clock, drain


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue[str]:
    return WorkQueue(clock)


def test_a_failing_key_backs_off_by_powers_of_two_up_to_the_bound(
    queue: WorkQueue[str], clock: Clock
) -> None:
    waits = []
    for _ in range(20):
        queue.add_rate_limited("a")
        wait = queue.next_ready()
        assert wait is not None
        waits.append(wait)
        clock.now += wait
        assert drain(queue) == ["a"]
    assert waits[:4] == pytest.approx([0.005, 0.01, 0.02, 0.04])
    assert waits[17:] == pytest.approx([0.005 * 2**17, 1000, 1000])
    assert queue.failures("a") == 20


def test_ten_thousand_failures_do_not_overflow(clock: Clock) -> None:
    queue: WorkQueue[str] = WorkQueue(
        clock, limit=RateLimit(overall=Rate(per_second=1e9, burst=100))
    )
    for _ in range(10_000):
        queue.add_rate_limited("a")
    queue.add_rate_limited("b")
    assert queue.next_ready() == pytest.approx(0.005)
    assert queue.failures("a") == 10_000


def test_a_retry_after_counts_as_a_failure(queue: WorkQueue[str], clock: Clock) -> None:
    waits = []
    for _ in range(10):
        queue.add_rate_limited("a", at_least=1.0)
        wait = queue.next_ready()
        assert wait is not None
        waits.append(wait)
        clock.now += wait
        assert drain(queue) == ["a"]
    assert waits == pytest.approx([1] * 8 + [0.005 * 2**8, 0.005 * 2**9])
    assert queue.failures("a") == 10


def test_a_retry_after_takes_no_token(queue: WorkQueue[str], clock: Clock) -> None:
    for number in range(200):
        queue.add_rate_limited(f"key-{number}", at_least=1.0)
    queue.add_rate_limited("another")
    assert queue.next_ready() == pytest.approx(0.005)


def test_success_forgets_failures(queue: WorkQueue[str], clock: Clock) -> None:
    for _ in range(5):
        queue.add_rate_limited("a")
    clock.now += 1
    assert drain(queue) == ["a"]
    queue.forget("a")
    queue.forget("never seen")
    assert queue.failures("a") == 0
    queue.add_rate_limited("a")
    assert queue.next_ready() == pytest.approx(0.005)


def test_a_burst_of_failures_is_spread_by_the_overall_bucket(
    queue: WorkQueue[str], clock: Clock
) -> None:
    start = clock.now
    for number in range(130):
        queue.add_rate_limited(f"key-{number}")
    clock.now = start + 0.005
    assert len(drain(queue)) == 100
    assert queue.next_ready() == pytest.approx(0.095)
    clock.now = start + 1.0001
    assert len(drain(queue)) == 10
    clock.now = start + 3.0001
    assert len(drain(queue)) == 20


def test_the_bucket_fills_up_again_but_not_beyond_its_burst(
    queue: WorkQueue[str], clock: Clock
) -> None:
    for round_number in range(2):
        for number in range(100):
            queue.add_rate_limited(f"{round_number}-{number}")
        clock.now += 0.005
        assert len(drain(queue)) == 100
        clock.now += 1000
    for number in range(101):
        queue.add_rate_limited(f"more-{number}")
    clock.now += 0.005
    assert len(drain(queue)) == 100


def test_plain_adds_are_not_rate_limited(queue: WorkQueue[str]) -> None:
    for number in range(1000):
        queue.add(f"key-{number}")
    assert len(drain(queue)) == 1000
