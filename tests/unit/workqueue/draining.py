"""A clock that a test sets, and all keys of a queue."""

from torchrun_controller.workqueue import WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drain(queue: WorkQueue[str]) -> list[str]:
    keys = []
    while (key := queue.get()) is not None:
        queue.done(key)
        keys.append(key)
    return keys
