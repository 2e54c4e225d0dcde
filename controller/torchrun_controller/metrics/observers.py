"""Metrics of informers, and of work queues under the names of client-go."""

from collections.abc import Sized
from typing import Protocol

from torchrun_controller.metrics.registry import Metrics


class WatchObserver:
    """An informer's `Observer`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def synced(self, resource: str, objects: int) -> None:
        """Count a list that has replaced the store; the size is read at each scrape."""
        self._metrics.watch_lists.labels(resource).inc()

    def changed(self, resource: str) -> None:
        """Do nothing: events of watches are too frequent to count."""

    def faulted(self, resource: str) -> None:
        """Count a frame that was skipped because it does not decode."""
        self._metrics.watch_skipped_frames.labels(resource).inc()

    def interrupted(self, resource: str, reason: str, relist: bool) -> None:
        """Count a failed list or watch by its reason."""
        self._metrics.watch_restarts.labels(resource, reason).inc()


class MeasuredQueue(Sized, Protocol):
    """The part of a work queue that a scrape reads; its length is the depth."""

    def unfinished(self) -> tuple[float, float]:
        """Return the seconds that keys have been in process: the sum, and the longest."""


class QueueObserver:
    """Counts the operations of the work queue of one controller; see `workqueue.Observer`."""

    def __init__(self, metrics: Metrics, controller: str) -> None:
        self._adds = metrics.workqueue_adds.labels(controller)
        self._retries = metrics.workqueue_retries.labels(controller)
        self._queue_seconds = metrics.workqueue_queue_seconds.labels(controller)
        self._work_seconds = metrics.workqueue_work_seconds.labels(controller)

    def added(self) -> None:
        """A key was added that was not waiting yet."""
        self._adds.inc()

    def dequeued(self, seconds: float) -> None:
        """A key was taken, `seconds` after its add."""
        self._queue_seconds.observe(seconds)

    def finished(self, seconds: float) -> None:
        """The processing of a key ended after `seconds`."""
        self._work_seconds.observe(seconds)

    def retried(self) -> None:
        """A key failed and was added with the rate limit."""
        self._retries.inc()


def watch_queue(metrics: Metrics, controller: str, queue: MeasuredQueue) -> None:
    """Export depth and unfinished work of the work queue of a controller."""
    metrics.workqueue_depth.labels(controller).set_function(lambda: len(queue))
    metrics.workqueue_unfinished_seconds.labels(controller).set_function(
        lambda: queue.unfinished()[0]
    )
    metrics.workqueue_longest_seconds.labels(controller).set_function(lambda: queue.unfinished()[1])
