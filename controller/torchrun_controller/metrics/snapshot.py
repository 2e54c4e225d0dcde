"""A copy of all metrics, and its text."""

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class MetricsSnapshot(Collector):
    """A copy of all values, which a thread may render without delaying the event loop."""

    def __init__(self, families: tuple[Metric, ...]) -> None:
        self._families = families

    def collect(self) -> tuple[Metric, ...]:
        """Return the families, for the encoders of prometheus_client."""
        return self._families

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as bytes, and their Content-Type, by the Accept header.

        The format is OpenMetrics if the header lists it, else the text format.
        """
        encoder, content_type = choose_encoder(accept)
        return encoder(self), content_type
