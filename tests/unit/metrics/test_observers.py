"""The metrics of a work queue, by what happens to its keys."""

from torchrun_controller.metrics.observers import QueueObserver, watch_queue
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.workqueue import WorkQueue
from unit.metrics.test_registry import Clock


def test_the_work_queue_under_client_gos_names() -> None:
    clock = Clock()
    metrics = Metrics()
    queue: WorkQueue[str] = WorkQueue(clock, observer=QueueObserver(metrics, "job"))
    watch_queue(metrics, "job", queue)

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
