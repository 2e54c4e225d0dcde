"""Metrics of informers."""

from torchrun_controller.metrics.registry import Metrics


class WatchObserver:
    """An informer's `Observer`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def synced(self, resource: str, objects: int) -> None:
        """A whole list has replaced the store: its size is read off at each scrape."""
        self._metrics.watch_lists.labels(resource).inc()

    def changed(self, resource: str) -> None:
        """One event of a watch has changed the store: too frequent to count."""

    def faulted(self, resource: str) -> None:
        """One frame was skipped because it could not be used."""
        self._metrics.watch_skipped_frames.labels(resource).inc()

    def interrupted(self, resource: str, reason: str, relist: bool) -> None:
        """A list or watch has failed."""
        self._metrics.watch_restarts.labels(resource, reason).inc()
