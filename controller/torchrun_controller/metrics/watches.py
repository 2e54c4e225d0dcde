"""Metrics of informers."""

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
