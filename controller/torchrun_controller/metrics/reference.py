"""Writes the table of all metrics: python -m torchrun_controller.metrics.reference FILE."""

import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from torchrun_controller.metrics.jobs import JobMetrics
from torchrun_controller.metrics.per_job import PerJobMetrics
from torchrun_controller.metrics.registry import Metrics

OPENING = """# Metrics

Generated from the controller by `make generate`. The names are stable: dashboards and alerts of
yours may be written against them. `GET /metrics` on port 8080 of every replica gives the text
format or OpenMetrics; the answer stays under 1 MB, whatever there is in the cluster.

- **Counters begin at 0 with each process**, and a controller that takes over counts nothing again.
  Use `sum(increase(...))` over all replicas.
- **Jobs and queues are told by the leader only**, so that sums over replicas are right.
- **The first 100 queues** have series of their own; all others are one, with the queue `(others)`.
  Reasons are bounded likewise.
- **Single jobs** have series only with `--metrics-jobs=N` (`TORCHRUN_METRICS_JOBS`), for N jobs at
  most.
- Histograms of what jobs go through carry exemplars with the job's name, in OpenMetrics: start
  Prometheus with `--enable-feature=exemplar-storage` to see them in Grafana.
- What client-go and controller-runtime have names for has these names.

Alerts, and what to do about each: [runbooks](runbooks.md). Prometheus, Grafana and the Prometheus
operator: [monitoring](monitoring.md).

| metric | type | labels | meaning |
|---|---|---|---|
"""
CLOSING = """
Beside these there are those of every Python process: `process_resident_memory_bytes`,
`process_cpu_seconds_total`, `process_open_fds`, `process_start_time_seconds`,
`python_gc_collections_total`, `python_info` and their like.
"""


class Family(Struct, frozen=True):
    """One metric as queries name it; of a histogram the name without `_bucket`."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


def families() -> list[Family]:
    """Every metric of the controller, by name."""
    metrics = Metrics()
    metrics.register(
        JobMetrics(metrics.queue_labels, leads=lambda: False, now=lambda: 0.0, nodes=lambda: None)
    )
    metrics.register(PerJobMetrics(0, leads=lambda: False, get=lambda namespace, name: None))
    return sorted(_described(metrics), key=lambda family: family.name)


def _described(metrics: Metrics) -> Iterator[Family]:
    # prometheus_client tells nobody the labels of a metric without series.
    for collector in list(metrics.registry._collector_to_names):
        if not hasattr(collector, "describe"):
            continue
        for family in collector.describe():
            labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
            suffix = "_total" if family.type == "counter" else ""
            yield Family(family.name + suffix, family.type, tuple(labels), family.documentation)


def render() -> str:
    """The page."""
    rows = [
        f"| `{family.name}` | {family.type} | {', '.join(family.labels) or '-'} | {family.help} |"
        for family in families()
    ]
    return OPENING + "\n".join(rows) + "\n" + CLOSING


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
