"""What goes on beside a test."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(step: Callable[[], None], pause: float) -> Iterator[None]:
    """Take a step each `pause` seconds, in a thread, until the end of the block.

    One that raises is the last, and the end of the block raises it.
    """
    over = threading.Event()
    problems: list[BaseException] = []

    def run() -> None:
        try:
            while not over.wait(pause):
                step()
        except BaseException as error:  # the test's own thread shows it
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if problems:
        raise problems[0]
