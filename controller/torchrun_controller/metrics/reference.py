"""Write the reference page of all metrics: python -m torchrun_controller.metrics.reference FILE."""

import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from torchrun_controller.metrics.jobs import JobMetrics
from torchrun_controller.metrics.per_job import PerJobMetrics
from torchrun_controller.metrics.registry import Metrics

OPENING = """# Metrics

Query the controller's metrics, or write your own alerts and dashboards: names and labels are
stable. Every replica serves them on port 8080 at `/metrics`, as text or OpenMetrics. See
[monitoring](operations.md#monitoring) for Prometheus and Grafana, and the
[runbooks](runbooks.md) for the shipped alerts.

- **Counters** start at 0 in each process, and a new leader counts nothing twice. Use
  `sum(increase(...))` over all replicas.
- **Jobs and queues** are exported by the leader only, so sums over replicas are correct.
- **Queues:** the first 100 have their own series. All others, and queues that do not
  exist, share the queue `(others)`, without `torchrun_queue_ready` and without the quota and the
  admitted GPUs, so TorchrunQueueNotReady does not see them. `torchrun_queue_waiting_jobs` has at
  most 200 series. Further reasons share `(others)`, which TorchrunJobsBlocked does not see. A
  scrape stays below 1 MB.
- **Single jobs** have series of their progress only with `--metrics-jobs=N`
  (`TORCHRUN_METRICS_JOBS`), for at most N jobs.
- **Exemplars:** in OpenMetrics the histograms of jobs have exemplars with the job's name. Start
  Prometheus with `--enable-feature=exemplar-storage` to see them in Grafana.
- **Names:** the `workqueue_*` metrics have the names and meaning of client-go and
  controller-runtime. All other metrics of the controller have their own names; there is no
  `controller_runtime_*` or `rest_client_*`.

The table is generated from the code by `make generate`.

| metric | type | labels | meaning |
|---|---|---|---|
"""
CLOSING = """
The metrics of every Python process exist too: `process_resident_memory_bytes`,
`process_cpu_seconds_total`, `process_open_fds`, `process_start_time_seconds`,
`python_gc_collections_total`, `python_info` and others.
"""


class Family(Struct, frozen=True):
    """One metric with its name in queries; a histogram without `_bucket`."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


def families() -> list[Family]:
    """Return every metric of the controller, sorted by name."""
    metrics = Metrics()
    metrics.register(
        JobMetrics(
            metrics.queue_labels,
            leads=lambda: False,
            now=lambda: 0.0,
            monotonic=lambda: 0.0,
            nodes=lambda: None,
        )
    )
    metrics.register(
        PerJobMetrics(
            0, leads=lambda: False, get=lambda namespace, name: None, progress=lambda key: None
        )
    )
    return sorted(_list_families(metrics), key=lambda family: family.name)


def _list_families(metrics: Metrics) -> Iterator[Family]:
    # prometheus_client has no public access to the labels of a metric without series.
    for collector in list(metrics.registry._collector_to_names):
        if not hasattr(collector, "describe"):
            continue
        for family in collector.describe():
            labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
            suffix = "_total" if family.type == "counter" else ""
            yield Family(family.name + suffix, family.type, tuple(labels), family.documentation)


def render() -> str:
    """Return the page as Markdown."""
    rows = [
        f"| `{family.name}` | {family.type} | {', '.join(family.labels) or '-'} | {family.help} |"
        for family in families()
    ]
    return OPENING + "\n".join(rows) + "\n" + CLOSING


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
