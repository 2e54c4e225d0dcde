"""Random sequences of calls, compared with a simple model."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from profiles import examples
from torchrun_controller.workqueue import WorkQueue

KEYS = st.sampled_from("abcde")
PRIORITIES = st.sampled_from([-100, 0, 0, 7])
SECONDS = st.sampled_from([0.0, 0.001, 0.5, 1.0, 1.0, 30.0, 86_400.0])


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue: WorkQueue[str] = WorkQueue(lambda: self.now)
        self.waiting: list[tuple[int, str]] = []  # in order of arrival at this priority
        self.marked: dict[str, int] = {}
        self.processing: set[str] = set()
        self.deadlines: dict[str, tuple[float, int]] = {}
        self.suspended: dict[str, tuple[float, int]] = {}  # of keys in process
        self.down = False

    def model_add(self, key: str, priority: int) -> None:
        if self.down:
            return
        if key in self.processing:
            self.marked[key] = max(priority, self.marked.get(key, priority))
            return
        for held, waiting in self.waiting:
            if waiting == key:
                if held >= priority:
                    return
                self.waiting.remove((held, waiting))
                break
        self.waiting.append((priority, key))

    def model_promote(self) -> None:
        due = [(at, key) for key, (at, _) in self.deadlines.items() if at <= self.now]
        for _, key in sorted(due, key=lambda pair: pair[0]):
            _, priority = self.deadlines.pop(key)
            self.model_add(key, priority)

    @rule(key=KEYS, priority=PRIORITIES)
    def add(self, key: str, priority: int) -> None:
        self.queue.add(key, priority)
        self.model_add(key, priority)

    @rule(key=KEYS, seconds=SECONDS, priority=PRIORITIES)
    def add_after(self, key: str, seconds: float, priority: int) -> None:
        self.now += 2**-20  # distinct deadlines: the order of equal ones is undefined
        self.queue.add_after(key, seconds, priority)
        if self.down:
            return
        if seconds <= 0:
            self.model_add(key, priority)
            return
        self.model_put(key, self.now + seconds, priority)

    def model_put(self, key: str, at: float, priority: int) -> None:
        held_at, held_priority = self.deadlines.get(key, (at, priority))
        self.deadlines[key] = (min(at, held_at), max(priority, held_priority))

    @rule(key=KEYS)
    def fail(self, key: str) -> None:
        self.now += 2**-20
        failures = self.queue.failures(key)
        before = self.queue.delayed
        self.queue.add_rate_limited(key)
        if self.down:
            assert self.queue.failures(key) == failures
            return
        assert self.queue.failures(key) == failures + 1
        assert self.queue.delayed == max(before, len(self.deadlines | {key: (0.0, 0)}))
        at, _ = self.queue._delayed._entries[key]
        assert at - self.now >= min(0.005 * 2**failures, 1000) - 1e-9 or key in self.deadlines
        held_at, held_priority = self.deadlines.get(key, (at, 0))
        assert at <= held_at
        self.deadlines[key] = (at, max(0, held_priority))

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.queue.forget(key)
        self.suspended.pop(key, None)
        assert self.queue.failures(key) == 0

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.5, 1.0, 40.0, 100_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def get(self) -> None:
        self.model_promote()
        key = self.queue.get()
        if not self.waiting:
            assert key is None
            return
        assert key is not None
        assert key not in self.processing
        top = max(priority for priority, _ in self.waiting)
        line = [waiting for priority, waiting in self.waiting if priority == top]
        assert key == line[0]
        self.waiting.remove((top, key))
        self.processing.add(key)
        if key in self.deadlines:
            self.suspended[key] = self.deadlines.pop(key)

    @precondition(lambda self: self.processing)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.processing)))
        self.queue.done(key)
        self.processing.remove(key)
        if key in self.suspended:
            self.model_put(key, *self.suspended.pop(key))
        if key in self.marked:
            self.waiting.append((self.marked.pop(key), key))

    @rule(kept=st.sets(KEYS))
    def retain(self, kept: set[str]) -> None:
        self.queue.retain(kept.__contains__)
        self.waiting = [(priority, key) for priority, key in self.waiting if key in kept]
        self.deadlines = {key: at for key, at in self.deadlines.items() if key in kept}

    @rule()
    def shut_down(self) -> None:
        self.queue.shut_down()
        self.down = True
        self.deadlines.clear()
        self.suspended.clear()

    @invariant()
    def fields_agree(self) -> None:
        queue = self.queue
        in_lines = [key for line in queue._lines.values() for key in line]
        assert len(in_lines) == len(set(in_lines))
        assert all(queue._lines.values())
        assert not set(in_lines) & set(queue._processing)
        assert set(queue._dirty) == set(in_lines) | (set(queue._dirty) & set(queue._processing))
        for priority, line in queue._lines.items():
            assert all(queue._dirty[key][0] == priority for key in line)
        in_heap = {(deadline, key) for deadline, _, key in queue._delayed._heap}
        assert {(due, key) for key, (due, _) in queue._delayed._entries.items()} <= in_heap
        assert len(queue._delayed._heap) <= 2 * len(queue._delayed._entries) + 65
        assert queue._limiter._bucket.level() <= queue._limiter._limit.overall.burst

    @invariant()
    def model_agrees(self) -> None:
        assert len(self.queue) == len(self.waiting) + len(self.marked)
        assert set(self.queue._processing) == self.processing
        assert self.queue.delayed == len(self.deadlines)
        expected = min((at for at, _ in self.deadlines.values()), default=None)
        if self.waiting:
            assert self.queue.next_ready() == 0
        elif expected is None:
            assert self.queue.next_ready() is None
        else:
            assert self.queue.next_ready() == max(0.0, expected - self.now)


TestQueue = QueueMachine.TestCase
TestQueue.settings = examples(150, stateful_step_count=60)
