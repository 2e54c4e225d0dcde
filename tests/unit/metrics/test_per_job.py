from datetime import UTC, datetime

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from metrics_world import job
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import Checkpoint, Progress
from torchrun_controller.cache.store import Change
from torchrun_controller.metrics.per_job import PerJobMetrics


class World:
    def __init__(self, most: int) -> None:
        self.jobs: dict[tuple[str, str], TorchrunJob] = {}
        self.reports: dict[tuple[str, str], Progress] = {}
        self.leads = True
        self.registry = CollectorRegistry()
        self.each = PerJobMetrics(
            most,
            leads=lambda: self.leads,
            get=lambda namespace, name: self.jobs.get((namespace, name)),
            progress=self.reports.get,
        )
        self.registry.register(self.each)

    def put(self, *jobs: TorchrunJob) -> None:
        for made in jobs:
            key = made.metadata.namespace, made.metadata.name
            self.each.job_changed(Change(self.jobs.get(key), made), False)
            self.jobs[key] = made
            self.reports[key] = Progress(step=1)

    def remove(self, name: str) -> None:
        self.each.job_changed(Change(self.jobs.pop(("team", name)), None), False)

    def shown(self) -> list[str]:
        return sorted(
            sample.labels["torchrun_job"]
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "torchrun_job_step"
        )


def test_no_series_by_default() -> None:
    world = World(0)
    world.put(job("a", "Running"))
    assert world.shown() == []


def test_a_standby_has_no_series() -> None:
    world = World(1)
    world.put(job("a", "Running"))
    world.leads = False
    assert world.shown() == []


def test_the_first_unfinished_jobs_keep_their_series() -> None:
    world = World(2)
    world.put(job("old", "Succeeded"), job("a", "Running"), job("b", None), job("c", "Running"))
    assert world.shown() == ["a", "b"]
    world.put(job("a", "Queued"))
    assert world.shown() == ["a", "b"]


def test_a_finished_job_keeps_its_series_until_another_needs_it() -> None:
    world = World(2)
    world.put(job("a", "Running"), job("b", "Running"))
    world.put(job("a", "Failed"))
    assert world.shown() == ["a", "b"]
    world.put(job("c", "Pending"))
    assert world.shown() == ["b", "c"]
    world.put(job("b", "Succeeded"), job("b", "Succeeded"))
    world.remove("b")
    assert world.shown() == ["c"]
    world.put(job("d", "Pending"), job("e", "Pending"))
    world.remove("c")
    assert world.shown() == ["d", "e"]


def test_a_list_may_show_an_unfinished_job_in_place_of_a_finished_one() -> None:
    """The finished job was deleted and created again while the watch was broken."""
    world = World(1)
    world.put(job("a", "Running"), job("a", "Succeeded"), job("a", "Running"), job("b", "Pending"))
    assert world.shown() == ["a"]
    world.put(job("a", "Failed"))
    assert world.shown() == ["b"]


def test_the_series_of_a_job() -> None:
    world = World(1)
    made = job("a", "Running")
    progress = Progress(step=7, loss=0.5, samples_per_second=99.5)
    world.put(replace(made, status=replace(made.status, progress=progress)))
    world.reports.clear()
    own = {"job_namespace": "team", "torchrun_job": "a"}
    value = world.registry.get_sample_value
    assert value("torchrun_job_step", own) == 7
    assert value("torchrun_job_loss", own) == 0.5
    assert value("torchrun_job_samples_per_second", own) == 99.5
    world.reports["team", "a"] = Progress(step=8, loss=0.123456)
    assert value("torchrun_job_step", own) == 8
    assert value("torchrun_job_loss", own) == 0.123456, "the status has rounded numbers"


def test_the_last_checkpoint_of_a_job() -> None:
    world = World(1)
    made = job("a", "Running")
    last = Checkpoint(step=1200, path="/c", time=datetime(2026, 1, 2, 3, 4, 5, 500_000, UTC))
    world.put(replace(made, status=replace(made.status, last_checkpoint=last)))
    own = {"job_namespace": "team", "torchrun_job": "a"}
    value = world.registry.get_sample_value
    assert value("torchrun_job_checkpoint_step", own) == 1200
    assert value("torchrun_job_checkpoint_timestamp_seconds", own) == last.time.timestamp()


def test_a_job_without_a_report_has_no_series() -> None:
    world = World(1)
    made = job("a", "Running")
    world.jobs["team", "a"] = made
    world.each.job_changed(Change(None, made), False)
    assert world.shown() == []
