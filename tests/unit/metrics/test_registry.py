import asyncio
from pathlib import Path

import pytest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from torchrun_controller.metrics import reference
from torchrun_controller.metrics.observers import watch_queue
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.workqueue import WorkQueue

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

# Dashboards and alerts use these names. A change here breaks them.
NAMES = {
    "torchrun_admission_seconds",
    "torchrun_build_info",
    "torchrun_gang_start_seconds",
    "torchrun_job_checkpoint_step",
    "torchrun_job_checkpoint_timestamp_seconds",
    "torchrun_job_loss",
    "torchrun_job_samples_per_second",
    "torchrun_job_step",
    "torchrun_jobs_oldest_seconds",
    "torchrun_node_gpus",
    "torchrun_phase_seconds",
    "torchrun_preemptions_total",
    "torchrun_queue_gpu_seconds_total",
    "torchrun_queue_gpus",
    "torchrun_queue_jobs",
    "torchrun_queue_jobs_finished_total",
    "torchrun_queue_ready",
    "torchrun_queue_restarts_total",
    "torchrun_queue_waiting_jobs",
    "torchrun_restarts_total",
    "torchrun_sync_bytes",
    "torchrun_unfenced_workers",
    "torchrun_api_request_seconds",
    "torchrun_api_requests_total",
    "torchrun_apply_total",
    "torchrun_job_start_seconds",
    "torchrun_jobs",
    "torchrun_jobs_reporting",
    "torchrun_network_nodes",
    "torchrun_slow_network_jobs",
    "torchrun_leader",
    "torchrun_lease_transitions_total",
    "torchrun_progress_reports_total",
    "torchrun_reconcile_panics_total",
    "torchrun_reconcile_seconds",
    "torchrun_reconcile_total",
    "torchrun_stale_sync_skips_total",
    "torchrun_store_objects",
    "torchrun_sync_seconds",
    "torchrun_training_samples_per_second",
    "torchrun_watch_age_seconds",
    "torchrun_watch_lists_total",
    "torchrun_watch_restarts_total",
    "torchrun_watch_skipped_frames_total",
    "workqueue_adds_total",
    "workqueue_depth",
    "workqueue_longest_running_processor_seconds",
    "workqueue_queue_duration_seconds",
    "workqueue_retries_total",
    "workqueue_unfinished_work_seconds",
    "workqueue_work_duration_seconds",
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def text(metrics: Metrics) -> str:
    return metrics.snapshot().render("")[0].decode()


def wired() -> Metrics:
    metrics = Metrics()
    watch_queue(metrics, "job", WorkQueue(Clock()))
    return metrics


def test_names_are_stable_and_every_metric_has_help() -> None:
    documented = {family.name: family for family in reference.families()}
    assert set(documented) == NAMES
    for family in documented.values():
        assert len(family.help) > 15, family.name
        assert not {"job", "namespace", "pod", "instance"} & set(family.labels), family.name


def test_the_page_of_all_metrics_is_generated() -> None:
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text() == reference.render(), "run: make generate"


def test_process_metrics_exist() -> None:
    names = {family.name for family in parse_text(text(Metrics()))}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info"} <= names


def test_two_instances_do_not_share_values() -> None:
    first, second = Metrics(), Metrics()
    first.stale_sync_skips.inc()
    assert "torchrun_stale_sync_skips_total 1.0" in text(first)
    assert "torchrun_stale_sync_skips_total 0.0" in text(second)


def test_labels_and_values_of_writes() -> None:
    metrics = Metrics()
    metrics.reconciles.labels(controller="job", outcome="Done").inc()
    metrics.reconcile_seconds.labels(controller="job", outcome="Done").observe(0.002)
    metrics.observe_request("patch", "pods", 409, 0.003)
    metrics.observe_request("patch", "pods", 0, 30)
    metrics.watch_restarts.labels(resource="pods", cause="expired").inc()
    metrics.watch_lists.labels(resource="pods").inc()
    metrics.watch_skipped_frames.labels(resource="pods").inc()
    metrics.applies.labels(resource="pods", result="created").inc()
    metrics.lease_transitions.inc()
    metrics.reconcile_panics.inc()
    value = metrics.registry.get_sample_value
    assert value("torchrun_reconcile_total", {"controller": "job", "outcome": "Done"}) == 1
    below = {"controller": "job", "outcome": "Done", "le": "0.0025"}
    assert value("torchrun_reconcile_seconds_bucket", below) == 1
    api = {"verb": "patch", "resource": "pods"}
    assert value("torchrun_api_requests_total", api | {"code": "409"}) == 1
    assert value("torchrun_api_requests_total", api | {"code": "0"}) == 1
    assert value("torchrun_api_request_seconds_sum", api) == pytest.approx(30.003)
    restarts = {"resource": "pods", "cause": "expired"}
    assert value("torchrun_watch_restarts_total", restarts) == 1
    assert value("torchrun_watch_lists_total", {"resource": "pods"}) == 1
    assert value("torchrun_watch_skipped_frames_total", {"resource": "pods"}) == 1
    assert value("torchrun_apply_total", {"resource": "pods", "result": "created"}) == 1
    assert value("torchrun_lease_transitions_total") == 1
    assert value("torchrun_reconcile_panics_total") == 1


def test_gauges_are_read_at_scrape_time() -> None:
    metrics = Metrics()
    store: list[int] = []
    age, leads = [3.0], [False]
    metrics.watch_store("pods", store)
    metrics.watch_age("pods", lambda: age[0])
    metrics.watch_leadership(lambda: leads[0], "system/lease", "a")
    leader = {"lease": "system/lease", "scope": "a"}
    value = metrics.registry.get_sample_value
    assert value("torchrun_store_objects", {"resource": "pods"}) == 0
    assert value("torchrun_leader", leader) == 0
    store.append(1)
    age[0], leads[0] = 70.0, True
    assert value("torchrun_store_objects", {"resource": "pods"}) == 1
    assert value("torchrun_watch_age_seconds", {"resource": "pods"}) == 70
    assert value("torchrun_leader", leader) == 1


def test_both_formats_are_rendered_and_parse() -> None:
    metrics = wired()
    plain, plain_type = metrics.snapshot().render("text/plain")
    assert plain_type.startswith("text/plain")
    assert list(parse_text(plain.decode()))
    openmetrics, openmetrics_type = metrics.snapshot().render(OPENMETRICS)
    assert openmetrics_type.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")
    assert list(parse_openmetrics(openmetrics.decode()))  # type: ignore[no-untyped-call]


def test_rendering_in_a_thread_reads_no_values() -> None:
    scrapes = []

    class CountingCollector(Collector):
        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> list[Metric]:
            scrapes.append(1)
            return [GaugeMetricFamily("torchrun_jobs", "Text.", value=1)]

    async def main() -> bytes:
        metrics = Metrics()
        metrics.register(CountingCollector())
        snapshot = metrics.snapshot()
        assert scrapes == [1]
        return (await asyncio.to_thread(snapshot.render, ""))[0]

    assert b"torchrun_jobs" in asyncio.run(main())
    assert scrapes == [1]


def test_no_creation_times() -> None:
    assert "_created" not in text(wired())
