"""The synchronous core: one test for each guarantee of the contract."""

import pytest

from torchrun_controller.workqueue import INITIAL, WorkQueue
from unit.workqueue.draining import Clock, drain


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue[str]:
    return WorkQueue(clock)


def test_an_empty_queue_has_nothing_and_expects_nothing(queue: WorkQueue[str]) -> None:
    assert queue.get() is None
    assert queue.next_ready() is None
    assert len(queue) == 0


def test_first_in_first_out(queue: WorkQueue[str]) -> None:
    for key in "cab":
        queue.add(key)
    assert drain(queue) == ["c", "a", "b"]


def test_an_add_while_waiting_does_nothing(queue: WorkQueue[str]) -> None:
    for key in "aba":
        queue.add(key)
    assert len(queue) == 2
    assert drain(queue) == ["a", "b"]


def test_a_key_is_not_handed_out_twice_at_once(queue: WorkQueue[str]) -> None:
    queue.add("a")
    assert queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert queue.get() is None
    assert queue.next_ready() is None
    assert len(queue) == 1
    queue.done("a")
    assert queue.next_ready() == 0
    assert queue.get() == "a"
    queue.done("a")
    assert queue.get() is None


def test_a_marked_key_joins_the_end_of_its_priority(queue: WorkQueue[str]) -> None:
    queue.add("a")
    queue.get()
    queue.add("a")
    queue.add("b")
    queue.done("a")
    assert drain(queue) == ["b", "a"]


def test_done_without_get_is_an_error(queue: WorkQueue[str]) -> None:
    queue.add("a")
    with pytest.raises(KeyError):
        queue.done("a")


def test_higher_priorities_first(queue: WorkQueue[str]) -> None:
    queue.add("old-1", INITIAL)
    queue.add("new-1")
    queue.add("old-2", INITIAL)
    queue.add("urgent", 5)
    queue.add("new-2")
    assert drain(queue) == ["urgent", "new-1", "new-2", "old-1", "old-2"]


def test_an_add_with_a_higher_priority_raises_a_waiting_key(queue: WorkQueue[str]) -> None:
    for key in ("a", "b", "c"):
        queue.add(key, INITIAL)
    queue.add("x")
    queue.add("b")
    queue.add("b", INITIAL)
    assert drain(queue) == ["x", "b", "a", "c"]


def test_raising_the_only_key_of_a_priority(queue: WorkQueue[str]) -> None:
    queue.add("a", INITIAL)
    queue.add("a")
    queue.add("b", INITIAL)
    assert drain(queue) == ["a", "b"]


def test_a_marked_key_returns_with_its_highest_priority(queue: WorkQueue[str]) -> None:
    queue.add("a", INITIAL)
    queue.get()
    queue.add("a", INITIAL)
    queue.add("a", 1)
    queue.add("b")
    queue.done("a")
    assert drain(queue) == ["a", "b"]


def test_a_delayed_key_comes_at_its_deadline(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("a", 5)
    assert queue.get() is None
    assert queue.next_ready() == 5
    assert queue.delayed == 1
    clock.now += 4.999
    assert queue.get() is None
    clock.now += 1
    assert queue.next_ready() == 0
    assert queue.get() == "a"
    assert queue.delayed == 0


@pytest.mark.parametrize("seconds", [0, -1])
def test_no_delay_is_an_add(queue: WorkQueue[str], seconds: float) -> None:
    queue.add_after("a", seconds)
    assert queue.get() == "a"


@pytest.mark.parametrize("delays", [(9, 3), (3, 9), (3, 3), (9, 3, 6)])
def test_the_earliest_deadline_counts_and_only_once(
    queue: WorkQueue[str], clock: Clock, delays: tuple[float, ...]
) -> None:
    for seconds in delays:
        queue.add_after("a", seconds)
    assert queue.delayed == 1
    clock.now += 3
    assert drain(queue) == ["a"]
    clock.now += 100
    assert drain(queue) == []
    assert queue.next_ready() is None


def test_an_add_does_not_cancel_a_deadline(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("a", 5)
    queue.add("a")
    assert drain(queue) == ["a"]
    clock.now += 5
    assert drain(queue) == ["a"]


def test_a_success_drops_the_deadline_from_before_it(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("a", 5)
    queue.add("a")
    assert queue.get() == "a"
    queue.add_after("a", 7)
    queue.forget("a")
    queue.done("a")
    clock.now += 6
    assert drain(queue) == []
    clock.now += 1
    assert drain(queue) == ["a"], "the reconcile, or an event during it, has asked for it"


def test_a_failure_keeps_the_deadline_from_before_it(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("a", 5, 7)
    queue.add("a")
    assert queue.get() == "a"
    clock.now += 2
    queue.add_rate_limited("a", at_least=60)
    queue.done("a")
    queue.add("b")
    clock.now += 3
    assert drain(queue) == ["a", "b"], "with its priority"


def test_a_deadline_that_passes_during_a_failure_counts(
    queue: WorkQueue[str], clock: Clock
) -> None:
    queue.add_after("a", 5)
    queue.add("a")
    assert queue.get() == "a"
    clock.now += 6
    assert queue.get() is None
    queue.done("a")
    assert drain(queue) == ["a"]


def test_a_shutdown_drops_the_deadline_of_a_key_in_process(queue: WorkQueue[str]) -> None:
    queue.add_after("a", 5)
    queue.add("a")
    assert queue.get() == "a"
    queue.shut_down()
    queue.done("a")
    assert queue.next_ready() is None


def test_deadlines_pass_in_their_order_and_keep_the_highest_priority(
    queue: WorkQueue[str], clock: Clock
) -> None:
    queue.add_after("late", 3)
    queue.add_after("early", 1)
    queue.add_after("low", 0.5, INITIAL)
    queue.add_after("raised", 2, INITIAL)
    queue.add_after("raised", 9, 7)
    clock.now += 10
    assert drain(queue) == ["raised", "early", "late", "low"]


def test_a_deadline_during_processing_marks_the_key(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add("a")
    queue.get()
    queue.add_after("a", 1)
    clock.now += 1
    assert queue.get() is None
    queue.done("a")
    assert queue.get() == "a"


def test_stale_deadlines_do_not_pile_up(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("in front of them", 3600)
    for _ in range(10_000):
        queue.add_after("a", 86_400)
        queue.add_after("a", 0.001)
        clock.now += 0.001
        assert drain(queue) == ["a"]
    queue.add_after("a", 86_400)
    assert len(queue._delayed._heap) < 100
    assert queue.next_ready() == pytest.approx(3590)
    clock.now += 3590
    assert drain(queue) == ["in front of them"]
    assert queue.next_ready() == pytest.approx(86_400 - 3590)


def test_retain_drops_keys_and_deadlines(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add("gone")
    queue.add("low and gone", INITIAL)
    queue.add_after("late and gone", 1)
    queue.add_after("late", 2)
    queue.add("here")
    queue.retain(lambda key: "gone" not in key)
    assert (len(queue), queue.delayed) == (1, 1)
    assert drain(queue) == ["here"]
    assert queue.next_ready() == 2
    clock.now += 3
    assert drain(queue) == ["late"]
    queue.add("gone")
    assert drain(queue) == ["gone"], "it can be added again"


def test_retain_leaves_processed_keys_alone(queue: WorkQueue[str]) -> None:
    queue.add("gone")
    assert queue.get() == "gone"
    queue.add("gone")
    queue.retain(lambda key: False)
    queue.done("gone")
    assert drain(queue) == ["gone"]


def test_shutdown_ignores_adds_and_drops_deadlines(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("delayed", 1)
    queue.shut_down()
    assert queue.shutting_down
    queue.add("a")
    queue.add_after("b", 1)
    queue.add_rate_limited("c")
    clock.now += 1000
    assert drain(queue) == []
    assert queue.next_ready() is None
    assert queue.failures("c") == 0


def test_shutdown_still_hands_out_waiting_and_marked_keys(queue: WorkQueue[str]) -> None:
    queue.add("a")
    assert queue.get() == "a"
    queue.add("a")
    queue.add("b")
    queue.shut_down()
    queue.add("a", 5)
    assert queue.get() == "b"
    queue.done("a")
    assert queue.get() == "a"


def test_unfinished_work_is_summed(queue: WorkQueue[str], clock: Clock) -> None:
    assert queue.unfinished() == (0.0, 0.0)
    queue.add("a")
    queue.add("b")
    queue.get()
    clock.now += 3
    queue.get()
    clock.now += 1
    assert queue.unfinished() == (5.0, 4.0)
    queue.done("a")
    assert queue.unfinished() == (1.0, 1.0)


def test_the_observer_sees_every_change(clock: Clock) -> None:
    class Log:
        def __init__(self) -> None:
            self.lines: list[tuple[str, float]] = []

        def added(self) -> None:
            self.lines.append(("added", 0))

        def dequeued(self, waited: float) -> None:
            self.lines.append(("taken", waited))

        def finished(self, worked: float) -> None:
            self.lines.append(("finished", worked))

        def retried(self) -> None:
            self.lines.append(("retried", 0))

    log = Log()
    queue: WorkQueue[str] = WorkQueue(clock, observer=log)
    queue.add("a", INITIAL)
    queue.add("a", INITIAL)
    clock.now += 2
    queue.add("a")
    clock.now += 1
    queue.get()
    queue.add("a")
    clock.now += 4
    queue.done("a")
    queue.get()
    queue.add_rate_limited("a")
    assert log.lines == [
        ("added", 0),
        ("taken", 3),
        ("added", 0),
        ("finished", 4),
        ("taken", 4),
        ("retried", 0),
    ]
