import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from metrics_world import NOW, ago, job
from torchrun_api.kinds.core import (
    ContainerState,
    ContainerStatus,
    Job,
    JobStatus,
    Pod,
    PodStatus,
    StateTerminated,
)
from torchrun_api.kinds.job import TorchrunJob, TorchrunJobSpec, Volumes
from torchrun_api.kinds.meta import ChildMeta, Condition
from torchrun_api.kinds.status import Attempt, Phase
from torchrun_api.kinds.workspace import WorkspaceVolume
from torchrun_controller.metrics.changes import phase_since, record_status
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.model.observed import Observed, ObservedGang, ObservedWorkspace


class World:
    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.metrics.queue_labels.add(("team", "gpu"))

    def wrote(self, observed: Observed, **after: object) -> None:
        record_status(self.metrics, observed, replace(observed.job.status, **after), NOW)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def world() -> World:
    return World()


def ended(number: int, reason: str, *, counted: bool = False) -> Attempt:
    return Attempt(number=number, reason=reason, counted=counted)


def restarts(world: World) -> dict[tuple[str, ...], float]:
    return {
        (sample.labels["kind"], sample.labels["reason"]): sample.value
        for family in world.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "torchrun_restarts_total"
    }


def test_a_restart_counts_with_the_status_write_that_records_it(world: World) -> None:
    before = Observed(job=job("a", "Running"))
    world.wrote(before, phase="Queued", attempts=(ended(0, "OOMKilled", counted=True),))
    world.wrote(before, phase="Queued", attempts=(ended(0, "NodeLost"),))
    world.wrote(before, phase="Queued", attempts=(ended(0, "Shrinking"),))
    assert restarts(world) == {
        ("failure", "OOMKilled"): 1,
        ("disruption", "NodeLost"): 1,
        ("resize", "Shrinking"): 1,
    }
    labels = {"job_namespace": "team", "queue": "gpu"}
    assert world.value("torchrun_queue_restarts_total", **labels, kind="failure") == 1


def test_recorded_attempts_are_never_counted_again(world: World) -> None:
    """A controller that has just started or become the leader reads such a status."""
    previous = tuple(ended(n, "OOMKilled", counted=True) for n in range(3))
    present = job("a", "Running")
    status = replace(present.status, attempts=previous, attempt=3, restarts=3)
    observed = Observed(job=replace(present, status=status))
    world.wrote(observed, message="another message")
    world.wrote(observed, attempts=previous[1:])
    assert restarts(world) == {}
    world.wrote(observed, attempts=(*previous[1:], ended(3, "OOMKilled", counted=True)))
    assert restarts(world) == {("failure", "OOMKilled"): 1}


@pytest.mark.parametrize("reason", ["Suspended", "Preempted"])
def test_a_pause_is_no_restart(world: World, reason: str) -> None:
    world.wrote(Observed(job=job("a", "Running")), attempts=(ended(0, reason),))
    assert restarts(world) == {}


def test_the_last_failure_is_no_restart(world: World) -> None:
    failed = (ended(0, "OOMKilled", counted=True),)
    world.wrote(Observed(job=job("a", "Running")), phase="Failed", attempts=failed)
    assert restarts(world) == {}
    labels = {"job_namespace": "team", "queue": "gpu", "phase": "Failed"}
    assert world.value("torchrun_queue_jobs_finished_total", **labels) == 1


def test_the_series_of_a_deleted_queue_are_removed(world: World) -> None:
    world.wrote(Observed(job=job("a", "Running")), phase="Succeeded")
    labels = {"job_namespace": "team", "queue": "gpu", "phase": "Succeeded"}
    assert world.value("torchrun_queue_jobs_finished_total", **labels) == 1
    world.metrics.remove_queue(("team", "gpu"))
    assert world.value("torchrun_queue_jobs_finished_total", **labels) is None


def test_series_begin_at_0_so_that_prometheus_sees_the_first_step(world: World) -> None:
    world.metrics.add_queue(("team", "gpu"))
    labels = {"job_namespace": "team", "queue": "gpu"}
    assert world.value("torchrun_queue_restarts_total", **labels, kind="failure") == 0
    assert world.value("torchrun_queue_jobs_finished_total", **labels, phase="Failed") == 0
    assert world.value("torchrun_sync_seconds_count", source="zip") == 0
    assert world.value("torchrun_phase_seconds_count", phase="Queued") == 0


def test_reasons_from_a_users_container_are_bounded(world: World) -> None:
    for number in range(200):
        attempt = ended(0, f"Mine{number}" if number % 2 else f"{number}; drop", counted=True)
        world.wrote(Observed(job=job("a", "Running")), attempts=(attempt,))
    assert len(restarts(world)) == 61
    assert sum(restarts(world).values()) == 200


def test_time_in_a_phase_is_observed_as_it_ends(world: World) -> None:
    world.wrote(Observed(job=job("a", "Queued", since=90)), phase="Running")
    assert world.value("torchrun_phase_seconds_sum", phase="Queued") == 90
    world.wrote(Observed(job=job("a", "Running", since=90)), message="still")
    assert world.value("torchrun_phase_seconds_count", phase="Running") == 0


def test_a_phase_began_with_the_last_condition_that_makes_phases() -> None:
    def condition(kind: str, seconds: float) -> Condition:
        return Condition(type=kind, status="True", last_transition_time=ago(seconds))

    queued = job("a", "Queued", since=100)
    conditions = (condition("WorkspaceReady", 50), condition("Scheduled", 10))
    status = replace(queued.status, conditions=conditions)
    assert phase_since(replace(queued, status=status)) == ago(50)
    assert phase_since(replace(queued, status=replace(status, conditions=()))) == ago(100)
    assert phase_since(TorchrunJob()) is None


@pytest.mark.parametrize(("attempt", "label"), [(0, "first"), (2, "later")])
def test_the_start_of_a_gang(world: World, attempt: int, label: str) -> None:
    child = Job(metadata=ChildMeta(creation_timestamp=ago(7)))
    before = Observed(job=job("a", "Queued", since=40), gang=ObservedGang(child_jobs=(child,)))
    world.wrote(before, phase="Running", attempt=attempt)
    assert world.value("torchrun_gang_start_seconds_sum", attempt=label) == 7
    assert world.value("torchrun_job_start_seconds_sum") == 40, "no gang has run before"


def test_a_job_starts_once(world: World) -> None:
    """It is Queued again for its next gang, or after its Job was suspended."""
    again = job("a", "Queued", since=86410)
    again = replace(again, status=replace(again.status, start_time=ago(86390)))
    world.wrote(Observed(job=again), phase="Running")
    preempted = replace(again, status=replace(again.status, phase="Preempted"))
    world.wrote(Observed(job=preempted), phase="Running")
    assert world.value("torchrun_job_start_seconds_count") == 0


@pytest.mark.parametrize(("attempt", "label"), [(0, "first"), (2, "later")])
def test_a_gang_that_kueue_has_admitted_starts_when_its_job_resumes(
    world: World, attempt: int, label: str
) -> None:
    resumed = Condition(type="Suspended", status="False", last_transition_time=ago(7))
    child = Job(
        metadata=ChildMeta(creation_timestamp=ago(86400)), status=JobStatus(conditions=(resumed,))
    )
    before = Observed(job=job("a", "Queued", since=40), gang=ObservedGang(child_jobs=(child,)))
    world.wrote(before, phase="Running", attempt=attempt)
    assert world.value("torchrun_gang_start_seconds_sum", attempt=label) == 7


def test_a_suspended_gang_does_not_count_as_a_first_start(world: World) -> None:
    child = Job(metadata=ChildMeta(creation_timestamp=ago(7000)))
    world.wrote(
        Observed(job=job("a", "Preempted"), gang=ObservedGang(child_jobs=(child,))), phase="Running"
    )
    assert world.value("torchrun_gang_start_seconds_count", attempt="first") == 0


@pytest.mark.parametrize("phase", ["Queued", "Running"])
def test_a_sync_in_seconds_and_bytes(world: World, phase: Phase) -> None:
    terminated = StateTerminated(message='{"revision": 1, "bytes": 5000000}')
    status = ContainerStatus(name="sync", state=ContainerState(terminated=terminated))
    pod = Pod(
        metadata=ChildMeta(creation_timestamp=ago(12)),
        status=PodStatus(phase="Succeeded", container_statuses=(status,)),
    )
    spec = TorchrunJobSpec(
        job_queue="gpu", volumes=Volumes(workspace=WorkspaceVolume(source="git", url="u"))
    )
    syncing = replace(job("a", "Syncing"), spec=spec)
    world.wrote(Observed(job=syncing, workspace=ObservedWorkspace(sync_pods=(pod,))), phase=phase)
    assert world.value("torchrun_sync_seconds_sum", source="git") == 12
    assert world.value("torchrun_sync_bytes_sum", source="git") == 5_000_000


def test_clocks_that_differ_make_no_negative_times(world: World) -> None:
    world.wrote(Observed(job=job("a", "Queued", since=-30)), phase="Running")
    assert world.value("torchrun_phase_seconds_sum", phase="Queued") == 0


@pytest.mark.parametrize("name", ["a", "j" * 63])
def test_exemplars_name_the_job_in_openmetrics(world: World, name: str) -> None:
    world.wrote(Observed(job=job(name, "Queued", namespace="n" * 63, since=40)), phase="Running")
    openmetrics, _ = world.metrics.snapshot().render("application/openmetrics-text; version=1.0.0")
    text = openmetrics.decode()
    assert list(parse(text))  # type: ignore[no-untyped-call]
    expected = f"{'n' * 63}/{name}"[:110]
    assert f'# {{torchrun_job="{expected}"}} 40.0' in text


def test_an_unchanged_status_counts_nothing(world: World) -> None:
    empty = world.metrics.snapshot().render("")[0]
    world.wrote(Observed(job=job("a", "Running")))
    assert world.metrics.snapshot().render("")[0].count(b"\n") == empty.count(b"\n")


def test_the_shared_labels_of_other_queues_start_at_zero(world: World) -> None:
    others = {"job_namespace": "", "queue": "(others)"}
    assert world.value("torchrun_queue_restarts_total", **others, kind="failure") == 0
    assert world.value("torchrun_queue_jobs_finished_total", **others, phase="Failed") == 0
