"""What all runs of the simulation have in common."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import structlog

from torchrun_controller.cache import informer


@contextmanager
def surroundings() -> Iterator[None]:
    """Disable logging, whose formatting would take half of the time, and split each list.

    Others run between any two changes of a list, as they do with a long one.
    """
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        with patch.object(informer, "_BATCH", 1):
            yield
    finally:
        structlog.configure(**before)
