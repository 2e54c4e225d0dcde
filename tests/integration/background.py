"""Background work of tests."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(step: Callable[[], None], pause: float) -> Iterator[None]:
    """Call `step` every `pause` seconds in a thread until the end of the block.

    An exception ends the thread, and the end of the block raises it.
    """
    over = threading.Event()
    problems: list[BaseException] = []

    def run() -> None:
        try:
            while not over.wait(pause):
                step()
        except BaseException as error:  # raised in the thread of the test
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if problems:  # often the cause of what the block raised
            raise problems[0]
