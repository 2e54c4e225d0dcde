"""Which keys a change adds, and their priorities."""

from typing import Any

import msgspec
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from torchrun_api import names
from torchrun_api.kinds.core import Job, Pod, PodStatus
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import EVENTS, PODS
from torchrun_api.kinds.status import Progress
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.progress_reports import ReportingWorker
from torchrun_controller.cache.store import Change
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.serving.checks import caches_synced, watches_alive
from torchrun_controller.workqueue import WorkQueue

NEVER_SENT: Any = None  # without running informers


def readiness(world: "World") -> str:
    return caches_synced(world.factory.unsynced)()


def liveness(world: "World") -> str:
    return watches_alive(world.factory.idle_by_resource())()


class World:
    def __init__(self, namespace: str = "") -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.queue: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        self.factory = InformerFactory(NEVER_SENT, self.queue, namespace)

    def change(self, obj: Any, *, initial: bool = False) -> None:
        """Update the store, then call the handler, as the informer does."""
        for informer in self.factory.informers:
            if informer.kind.type is type(obj):
                informer.store.upsert(obj, 1)
                informer._on_change(Change(None, obj), initial)

    def keys(self) -> list[tuple[str, str]]:
        """Take all keys in order."""
        taken = list(iter(self.queue.get, None))
        for key in taken:
            self.queue.done(key)
        return taken


@pytest.fixture
def world() -> World:
    return World()


def a_job(name: str, *, queue: str = "research", phase: str | None = None) -> TorchrunJob:
    body = {
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"jobQueue": queue},
        "status": {"phase": phase} if phase else {},
    }
    return msgspec.convert(body, TorchrunJob)


def a_queue(namespace: str = "team") -> TorchrunQueue:
    body = {"metadata": {"name": "research", "namespace": namespace}}
    return msgspec.convert(body, TorchrunQueue)


def test_changes_go_before_objects_of_the_first_list(world: World) -> None:
    world.change(a_job("old", phase="Running"), initial=True)
    world.change(a_job("new"))
    assert world.keys() == [("team", "new"), ("team", "old")]


def test_a_new_job_goes_before_running_ones(world: World) -> None:
    world.change(a_job("runs", phase="Running"), initial=True)
    world.change(a_job("waits"), initial=True)
    assert world.keys() == [("team", "waits"), ("team", "runs")]


def test_readiness_names_what_is_missing_and_why(world: World) -> None:
    for informer in world.factory.informers:
        if informer.kind.plural in ("torchrunjobs", "pods"):
            code = 403 if informer.kind is PODS else 404
            informer.last_read.record("watch", code)
    message = readiness(world)
    assert "install the CustomResourceDefinition of torchrunjobs.torchrun.ai" in message
    assert "grant the controller's role the verb watch on pods" in message
    assert "services (waiting for the first list)" in message
    for informer in world.factory.informers:
        informer.synced.set()
    assert readiness(world) == ""


def test_a_hanging_watch_fails_the_liveness_check(world: World) -> None:
    assert liveness(world) == ""
    for informer in world.factory.informers:
        informer.last_seen -= 10_000
    assert liveness(world) == "", "the server is silent, not the informer"
    for informer in world.factory.informers:
        informer._last_action -= 10_000
    assert "pods" in liveness(world)


def test_readiness_does_not_wait_for_warnings(world: World) -> None:
    for informer in world.factory.informers:
        if informer.kind is not EVENTS:
            informer.synced.set()
    assert readiness(world) == ""
    for informer in world.factory.informers:
        if informer.kind is EVENTS:
            informer.synced.set()
            informer.last_seen = informer._last_action = -10_000
    assert liveness(world) == ""


async def test_optional_kinds_that_cannot_be_watched_are_named(world: World) -> None:
    kinds = frozenset({("scheduling.volcano.sh/v1beta1", "podgroups")})
    world.factory.discovery._update(Installed(resources=kinds))
    world.factory.groups.adjust(lambda watch: None)
    assert world.factory.shortcoming() == "", "there may be no response yet"
    for informer in (*world.factory.informers, *world.factory.groups.informers):
        if informer.kind.plural in ("events", "podgroups"):
            informer.last_read.record("list", 403)
    shortcoming = world.factory.shortcoming()
    assert "the verb list on events" in shortcoming
    assert "the verb list on podgroups.scheduling.volcano.sh" in shortcoming


@pytest.mark.parametrize("namespace", ["", "team"])
def test_one_namespace_or_all_are_watched(namespace: str) -> None:
    world = World(namespace)
    scope = f"/namespaces/{namespace}" if namespace else ""
    paths = {informer.path for informer in world.factory.informers}
    assert {f"/api/v1{scope}/pods", f"/api/v1{scope}/events", "/api/v1/nodes"} <= paths
    assert len(paths) == 8


def test_objects_of_a_cache_are_counted(world: World) -> None:
    world.factory.caches.jobs.upsert(a_job("run"), 5)
    for resource, objects in world.factory.objects_by_resource().items():
        world.metrics.watch_store(resource, objects)
    label = {"resource": "torchrunjobs.torchrun.ai"}
    assert world.metrics.registry.get_sample_value("torchrun_store_objects", label) == 1


def a_gang(attempt: int, uid: str) -> list[Any]:
    """A child Job of train with one worker."""
    labels = {
        names.JOB_LABEL: "train",
        names.COMPONENT_LABEL: names.WORKER,
        names.ATTEMPT_LABEL: str(attempt),
    }

    def meta(name: str, uid: str, owner: str) -> dict[str, Any]:
        owners = [{"uid": owner, "controller": True}]
        return {
            "name": name,
            "namespace": "team",
            "uid": uid,
            "labels": labels,
            "ownerReferences": owners,
        }

    job = {"metadata": meta(f"train-r{attempt}", uid, "uid-train")}
    pod = {"metadata": meta(f"train-r{attempt}-0", f"{uid}-pod", uid)}
    return [msgspec.convert(job, Job), msgspec.convert(pod, Pod)]


def test_workers_belong_to_the_current_attempt(world: World) -> None:
    job = a_job("train")
    world.change(structs.replace(job, metadata=structs.replace(job.metadata, uid="uid-train")))
    for obj in a_gang(1, "uid-1"):
        world.change(obj)
    key = ("team", "train")
    assert world.factory.worker("team", "train-r1-0", "uid-1-pod") == ReportingWorker(
        key, "uid-1", job_uid="uid-train"
    )
    assert world.factory.worker("team", "train-r1-0", "uid-of-an-older-pod") is None
    assert world.factory.worker("team", "train-r1-0", "") is None
    assert world.factory.worker("elsewhere", "train-r1-0", "uid-1-pod") is None
    for obj in a_gang(2, "uid-2"):
        world.change(obj)
    assert world.factory.worker("team", "train-r1-0", "uid-1-pod") is None
    assert world.factory.worker("team", "train-r2-0", "uid-2-pod") is not None
    _, former = a_gang(1, "uid-1")
    labels = structs.replace(former.metadata.labels, job_uid="uid-train")
    world.change(structs.replace(former, metadata=structs.replace(former.metadata, labels=labels)))
    assert world.factory.worker("team", "train-r1-0", "uid-1-pod") == ReportingWorker(
        key, "", job_uid="uid-train", is_current=False
    ), "a pod that still ends after its attempt"


def test_other_namespaces_have_no_workers() -> None:
    assert World("team").factory.worker("elsewhere", "a", "b") is None
    assert World("team").factory.job_of("elsewhere", "a", "b") is None


def test_the_claims_of_a_token_must_match_a_running_worker(world: World) -> None:
    _, pod = a_gang(1, "uid-1")
    world.change(pod)
    job_of = world.factory.job_of
    assert job_of("team", "train-r1-0", "uid-1-pod") == ("team", "train")
    assert job_of("team", "train-r1-0", "another") is None
    assert job_of("team", "train-r1-0", "") is None
    assert job_of("team", "train-r1-1", "uid-1-pod") is None
    world.change(structs.replace(pod, status=PodStatus(phase="Failed")))
    assert job_of("team", "train-r1-0", "uid-1-pod") is None


def test_the_report_of_a_deleted_job_is_forgotten(world: World) -> None:
    world.factory.reports.put(("team", "train"), "uid-1", Progress(step=1))
    informer = world.factory.informers[0]
    informer._on_change(Change(a_job("train"), None), False)
    assert world.factory.reports.of(("team", "train"), "uid-1") is None


def test_a_change_of_discovery_wakes_every_unfinished_job(world: World) -> None:
    world.change(a_job("waits", phase="Pending"))
    world.change(a_job("is-done", phase="Succeeded"))
    world.keys()
    schedulers = Installed(resources=frozenset({("scheduling.volcano.sh/v1beta1", "podgroups")}))
    world.factory.discovery._update(schedulers)
    assert world.keys() == [("team", "waits")]
    observed = world.factory.observe("team", "waits")
    assert observed is not None
    assert observed.cluster.installed == schedulers
