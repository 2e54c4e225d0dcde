import asyncio
from typing import get_args

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from torchrun_api.status import Phase
from torchrun_controller.metrics import Metrics
from torchrun_controller.workqueue import WorkQueue

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

# Dashboards and alerts are written against these: a change here breaks them.
NAMES = {
    "torchrun_admission_seconds",
    "torchrun_preemptions_total",
    "torchrun_queue_jobs",
    "torchrun_api_request_seconds",
    "torchrun_api_requests_total",
    "torchrun_apply_total",
    "torchrun_job_start_seconds",
    "torchrun_jobs",
    "torchrun_jobs_reporting",
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
    metrics.watch_queue("job", WorkQueue(Clock()))
    metrics.count_jobs(dict)
    return metrics


def test_the_names_are_stable_and_every_metric_says_what_it_means() -> None:
    families = {}
    for family in parse_text(text(wired())):
        if family.name.startswith(("torchrun_", "workqueue_")):
            suffix = "_total" if family.type == "counter" else ""
            families[family.name + suffix] = family
    assert set(families) == NAMES
    for family in families.values():
        assert len(family.documentation) > 15, family.name


def test_process_metrics_are_there() -> None:
    names = {family.name for family in parse_text(text(Metrics()))}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info"} <= names


def test_two_instances_do_not_share_values() -> None:
    first, second = Metrics(), Metrics()
    first.stale_sync_skips.inc()
    assert "torchrun_stale_sync_skips_total 1.0" in text(first)
    assert "torchrun_stale_sync_skips_total 0.0" in text(second)


def test_labels_and_values_of_what_is_written() -> None:
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
    metrics.sync_seconds.observe(12)
    metrics.job_start_seconds.observe(40)
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
    assert value("torchrun_sync_seconds_sum") == 12
    assert value("torchrun_job_start_seconds_count") == 1


def test_jobs_are_counted_at_scrape_time_with_zeros_for_empty_phases() -> None:
    metrics = Metrics()
    counts = {"Running": 2}
    metrics.count_jobs(lambda: counts)
    counts["Failed"] = 1
    value = metrics.registry.get_sample_value
    assert value("torchrun_jobs", {"phase": "Running"}) == 2
    assert value("torchrun_jobs", {"phase": "Failed"}) == 1
    assert value("torchrun_jobs", {"phase": "Pending"}) == 0
    assert text(metrics).count("torchrun_jobs{") == len(get_args(Phase))


def test_gauges_are_read_off_at_scrape_time() -> None:
    metrics = Metrics()
    store: list[int] = []
    age, leads = [3.0], [False]
    metrics.count_objects("pods", store)
    metrics.age_of_watch("pods", lambda: age[0])
    metrics.leadership(lambda: leads[0])
    value = metrics.registry.get_sample_value
    assert value("torchrun_store_objects", {"resource": "pods"}) == 0
    assert value("torchrun_leader") == 0
    store.append(1)
    age[0], leads[0] = 70.0, True
    assert value("torchrun_store_objects", {"resource": "pods"}) == 1
    assert value("torchrun_watch_age_seconds", {"resource": "pods"}) == 70
    assert value("torchrun_leader") == 1


def test_the_work_queue_under_client_gos_names() -> None:
    clock = Clock()
    metrics = Metrics()
    queue: WorkQueue[str] = WorkQueue(clock, observer=metrics.queue_observer("job"))
    metrics.watch_queue("job", queue)

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"name": "job"})

    queue.add("a")
    queue.add("b")
    assert value("workqueue_depth") == 2
    clock.now = 2
    queue.get()
    clock.now = 5
    queue.get()
    clock.now = 6
    assert value("workqueue_depth") == 0
    assert value("workqueue_unfinished_work_seconds") == 5
    assert value("workqueue_longest_running_processor_seconds") == 4
    queue.done("a")
    queue.add_rate_limited("a")
    assert value("workqueue_adds_total") == 2
    assert value("workqueue_retries_total") == 1
    assert value("workqueue_queue_duration_seconds_sum") == 7
    assert value("workqueue_work_duration_seconds_sum") == 4
    assert value("workqueue_work_duration_seconds_count") == 1


def test_both_formats_are_rendered_and_parse() -> None:
    metrics = wired()
    plain, plain_type = metrics.snapshot().render("text/plain")
    assert plain_type.startswith("text/plain")
    assert list(parse_text(plain.decode()))
    openmetrics, openmetrics_type = metrics.snapshot().render(OPENMETRICS)
    assert openmetrics_type.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")
    assert list(parse_openmetrics(openmetrics.decode()))  # type: ignore[no-untyped-call]


def test_a_snapshot_is_rendered_in_a_thread_without_asking_for_values() -> None:
    asked = []

    def phases() -> dict[str, int]:
        asked.append(1)
        return {}

    async def main() -> bytes:
        metrics = Metrics()
        metrics.count_jobs(phases)
        snapshot = metrics.snapshot()
        assert asked == [1]
        return (await asyncio.to_thread(snapshot.render, ""))[0]

    assert b"torchrun_jobs" in asyncio.run(main())
    assert asked == [1]


def test_no_creation_times() -> None:
    assert "_created" not in text(wired())
