"""Newer code for running gangs, standby sync pods, and workspaces with a base."""

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS
from unit.reconcile.workspace.reloading import (
    TOKEN,
    annotate,
    body,
    revision_complete,
    revisions,
    running,
    syncing,
    variables,
)
from world import ZIP, World, make_job, make_queue


def test_a_gang_starts_with_the_current_revision() -> None:
    world = running()
    template = body(world, JOBS, "train")["spec"]["template"]
    assert template["metadata"]["annotations"][names.REVISION] == "1"
    assert world.job.status.workspace_revision == 1


def test_newer_code_arrives_without_the_queue() -> None:
    world = running()
    world.queue = None
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-1"]
    assert "nodeSelector" not in body(world, PODS, "train-sync-1")["spec"]


def test_newer_code_reaches_running_workers() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-1"]
    pod = body(world, PODS, "train-sync-1")
    assert variables(pod["spec"])["TORCHRUN_SYNC_SHA256"] == "b" * 64
    assert (world.phase, revisions(world)) == ("Running", {"1"})
    revision_complete(world, 2, "b" * 64)
    uids = {pod.metadata.uid for pod in world.workers()}
    world.settle()
    assert revisions(world) == {"2"}
    assert {pod.metadata.annotations.start for pod in world.workers()} == {"0"}
    assert uids == {pod.metadata.uid for pod in world.workers()}
    status = world.job.status
    assert (status.workspace_revision, status.restarts, status.attempt) == (2, 0, 0)


def test_a_revision_is_announced_twice_because_the_kubelet_may_miss_one() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    revision_complete(world, 2, "b" * 64)
    before = {pod.metadata.uid: pod.metadata.annotations for pod in world.leaders()}
    world.settle()
    once = {pod.metadata.uid: pod.metadata.annotations for pod in world.leaders()}
    world.settle_twice()
    twice = {pod.metadata.uid: pod.metadata.annotations for pod in world.leaders()}
    for uid, annotations in before.items():
        assert once[uid] == replace(
            annotations, revision="2", notification_time="2026-01-02T03:04:05Z"
        )
        assert twice[uid] == replace(annotations, revision="2")


def test_the_next_gang_starts_with_the_newest_revision() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    revision_complete(world, 2, "b" * 64)
    world.settle()
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=world.now)
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=10)
    world.settle()
    template = body(world, JOBS, "train-r1")["spec"]["template"]
    assert template["metadata"]["annotations"][names.REVISION] == "2"


def test_no_reload_after_a_worker_has_ended() -> None:
    world = running()
    world.pod("train-0-abcde", phase="Succeeded")
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    revision_complete(world, 2, "b" * 64)
    world.settle()
    assert revisions(world) == {"1"}
    assert world.job.status.workspace_revision == 1
    assert world.condition(names.UP_TO_DATE).reason == "WorkersEnded"


def test_development_keeps_a_standby_sync_pod() -> None:
    world = running(development=True)
    assert syncing(world) == ["train-sync-0", "train-sync-1"]
    pod = body(world, PODS, "train-sync-1")
    assert variables(pod["spec"])["TORCHRUN_SYNC_AFTER"] == "1"
    assert "TORCHRUN_SYNC_SHA256" not in variables(pod["spec"])
    assert {p.metadata.annotations.development for p in world.workers()} == {"true"}
    world.pod("train-sync-1", phase="Running")
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-1"], "the pod accepts any upload"
    revision_complete(world, 2, "b" * 64)
    world.settle()
    assert revisions(world) == {"2"}
    assert syncing(world)[-1] == "train-sync-2"
    assert variables(body(world, PODS, "train-sync-2")["spec"])["TORCHRUN_SYNC_AFTER"] == "2"
    for number in (3, 4):
        revision_complete(world, number, "b" * 64)
        world.settle()
    assert len(syncing(world)) == 3


def test_a_standby_pod_accepts_uploads_with_the_token_only() -> None:
    world = running(development=True)
    name = "TORCHRUN_SYNC_UPLOAD_TOKEN_SHA256"
    assert variables(body(world, PODS, "train-sync-1")["spec"])[name] == TOKEN
    world.pod("train-sync-1", phase="Running")
    annotate(world, upload_token_sha256="f" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-2"], "an edit of the job applies"
    assert variables(body(world, PODS, "train-sync-2")["spec"])[name] == "f" * 64
    assert revisions(world) == {"1"}
    annotate(world, upload_token_sha256="")
    world.settle()
    assert syncing(world) == ["train-sync-0"], "no upload to it is possible"
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    pod = body(world, PODS, syncing(world)[-1])
    assert variables(pod["spec"])["TORCHRUN_SYNC_SHA256"] == "b" * 64
    assert name not in variables(pod["spec"])


def test_a_new_token_and_workspace_get_a_new_pod() -> None:
    world = running(development=True)
    world.pod("train-sync-1", phase="Running")
    annotate(world, workspace_sha256="b" * 64, upload_token_sha256="f" * 64)
    world.settle()
    pod = world.observed().workspace.sync_pods[-1]
    annotations = pod.metadata.annotations
    assert (annotations.workspace_sha256, annotations.upload_token_sha256) == ("b" * 64, "f" * 64)
    revision_complete(world, 2, "b" * 64)
    world.settle()
    assert revisions(world) == {"2"}


def test_a_revision_that_the_plugin_confirmed_is_announced_at_once() -> None:
    world = running(development=True)
    world.pod("train-sync-1", phase="Running")
    annotate(world, workspace_sha256="b" * 64, workspace_revision="7")
    world.settle()
    assert revisions(world) == {"1"}, "no pod can have created this revision"
    annotate(world, workspace_revision="2")
    world.settle()
    assert (revisions(world), syncing(world)[-1]) == ({"2"}, "train-sync-1")
    revision_complete(world, 2, "b" * 64)
    world.settle()
    assert (revisions(world), syncing(world)[-1]) == ({"2"}, "train-sync-2")
    assert variables(body(world, PODS, "train-sync-2")["spec"])["TORCHRUN_SYNC_AFTER"] == "2"


def test_an_announcement_that_outlived_its_claim_names_no_revision_of_the_next_one() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    revision_complete(world, 2, "b" * 64)
    annotate(world, workspace_revision="2")  # by the plugin
    world.settle()
    world.suspend()
    world.objects.pop((CLAIMS.plural, "train-workspace"))
    world.pass_time(minutes=1)
    world.resume()
    world.settle()
    latest = syncing(world)[-1]
    assert variables(body(world, PODS, latest)["spec"])["TORCHRUN_SYNC_LAST_REVISION"] == "2"
    world.pass_time(seconds=5)
    revision_complete(world, 3, "b" * 64)
    world.settle()
    template = body(world, JOBS, "train-r1")["spec"]["template"]
    assert template["metadata"]["annotations"][names.REVISION] == "3"


def test_a_restored_job_numbers_its_revisions_after_the_announced_one() -> None:
    world = World(make_job(numNodes=2, volumes=ZIP), make_queue())
    annotate(world, workspace_sha256="a" * 64, workspace_revision="2")
    world.settle()
    (pod,) = syncing(world)
    assert variables(body(world, PODS, pod)["spec"])["TORCHRUN_SYNC_LAST_REVISION"] == "2"


def test_a_standby_pod_delays_nothing() -> None:
    world = running(development=True)
    world.pod("train-sync-1", phase="Running")
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=world.now)
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=10)
    world.settle()
    assert world.observed().gang.child_jobs[-1].metadata.name == "train-r1"
    world.spec(development=False)
    world.all_workers("Running")
    world.settle()
    assert syncing(world) == ["train-sync-0"]
    assert {p.metadata.annotations.development for p in world.leaders()} == {""}


def fail_standby_pod(world: World, number: int, seconds: float) -> None:
    """The pod of this number fails, and another one follows after so many seconds."""
    world.end_container(f"train-sync-{number}", "sync", exit_code=1, finished_at=world.now)
    assert world.settle().requeue_after == seconds
    assert syncing(world)[-1] == f"train-sync-{number}"
    world.pass_time(seconds=seconds)
    world.settle()
    assert syncing(world)[-1] == f"train-sync-{number + 1}"


def test_failed_standby_pods_are_replaced_with_delays() -> None:
    fail_standby_pod(running(development=True), 1, 10)
    world = running(development=True)
    for revision in range(2, 5):
        revision_complete(world, revision, str(revision) * 64)
        world.settle()
    world.pass_time(minutes=1)
    world.settle()
    for number, seconds in ((4, 10), (5, 20), (6, 40), (7, 80)):
        fail_standby_pod(world, number, seconds)


def test_no_sync_without_a_claim() -> None:
    world = running(development=True)
    before = syncing(world)
    world.objects.pop((CLAIMS.plural, "train-workspace"))
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert syncing(world) == before


def test_deleted_sync_pods_keep_the_revision() -> None:
    world = running(development=True)
    for name in syncing(world):
        world.objects.pop((PODS.plural, name))
    world.settle()
    assert syncing(world) == ["train-sync-0"]
    revision_complete(world, 1, "a" * 64)
    world.settle()
    assert syncing(world) == ["train-sync-0", "train-sync-1"]
    assert variables(body(world, PODS, "train-sync-1")["spec"])["TORCHRUN_SYNC_AFTER"] == "1"


def fails(world: World) -> None:
    """The command of the gang fails."""
    world.end_container(world.workers()[0].metadata.name, "trainer", exit_code=1)
    world.settle()
    world.containers_stop()


def is_created(world: World, name: str) -> bool:
    return (JOBS.plural, name) in world.created


def test_a_gang_does_not_wait_for_an_interrupted_upload() -> None:
    world = running(reliability={"syncTimeoutSeconds": 600})
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    world.takes_upload()
    world.pass_time(minutes=5)
    fails(world)
    world.settle()
    assert is_created(world, "train-r1")
    assert (world.phase, revisions(world)) == ("Queued", {"1"})
    world.pass_time(hours=12)
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    revision_complete(world, 2, "b" * 64)
    world.settle()
    assert revisions(world) == {"2"}


def test_a_gang_waits_a_moment_for_an_upload() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    world.takes_upload()
    fails(world)
    plan = world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "WaitingForUpload")
    assert plan.requeue_after == 30
    world.pass_time(seconds=29)
    world.settle()
    assert not is_created(world, "train-r1")
    revision_complete(world, 2, "b" * 64)
    world.settle()
    assert revisions(world) == {"2"}


def test_a_gang_does_not_wait_for_a_sync_pod_without_a_node() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    world.not_placed("0/4 nodes are available", pod="train-sync-1")
    fails(world)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "Unschedulable")
    world.pass_time(seconds=30)
    world.settle()
    assert is_created(world, "train-r1")


def test_without_a_complete_workspace_the_next_gang_waits_for_the_upload() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    world.vanish("train-sync-0")
    world.takes_upload()
    fails(world)
    world.settle()
    world.pass_time(hours=12)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "WaitingForUpload")
    assert not is_created(world, "train-r1")
