"""Sources that the sync pod fetches, and existing PVCs."""

import msgspec
import pytest

from torchrun_api import names
from torchrun_api.kinds.resources import CLAIMS, PODS
from world import World, make_job, make_queue

GIT = {
    "source": "git",
    "url": "https://git.example/acme/train.git",
    "ref": "main",
    "secretRef": {"name": "login"},
}
COMMIT = "c0ffee" + "0" * 34


def fetching(**workspace):
    world = World(make_job(numNodes=1, volumes={"workspace": GIT | workspace}), make_queue())
    world.settle()
    return world


def sync_pods(world):
    return [pod.metadata.name for pod in world.observed().workspace.sync_pods]


def end(world, **result):
    pod = world.observed().workspace.sync_pods[-1].metadata.name
    message = msgspec.json.encode(result).decode()
    has_succeeded = "commit" in result
    world.end_container(
        pod,
        names.SYNC_CONTAINER,
        exit_code=0 if has_succeeded else 1,
        message=message,
        finished_at=world.now,
    )
    if has_succeeded:
        world.pod(pod, phase="Succeeded")


def running(world):
    end(world, commit=COMMIT, files=1, revision=1)
    world.settle()
    assert world.phase == "Queued"
    world.all_workers("Running")
    world.settle()
    return world


def environment(world, number):
    bodies = [a.body for plan in world.plans for a in plan.applies if a.kind is PODS]
    pods = {body["metadata"]["name"]: body for body in bodies}
    pod = pods[names.sync_pod("train", number)]
    return {v["name"]: v.get("value") for v in pod["spec"]["containers"][0]["env"]}


def request(world, when):
    meta = world.job.metadata
    annotations = {**meta.annotations, names.SYNC_REQUESTED: when}
    world.job = msgspec.structs.replace(
        world.job, metadata=msgspec.structs.replace(meta, annotations=annotations)
    )


def fix_source(world, **workspace):
    volumes = {"workspace": GIT | workspace}
    world.spec(volumes=make_job(volumes=volumes).spec.volumes)


def fail_gang(world):
    worker = world.workers()[0].metadata.name
    world.end_container(worker, names.TRAINER_CONTAINER, exit_code=1, finished_at=world.now)
    world.settle()


def test_a_fetch_is_described_without_the_user_of_its_url():
    world = fetching(url="ssh://git:secret@git.example/acme.git?token=secret", ref=None)
    world.pod("train-sync-0", phase="Running")
    world.settle()
    status = world.job.status
    assert (status.phase, status.reason) == ("Syncing", "Fetching")
    assert "ssh://git.example/acme.git" in status.message
    assert "secret" not in status.message


def test_the_ref_is_named_while_it_is_fetched():
    world = fetching()
    world.pod("train-sync-0", phase="Running")
    world.settle()
    assert "https://git.example/acme/train.git at main" in world.job.status.message


def test_the_commit_is_in_the_status_and_outlives_its_pod():
    world = running(fetching())
    assert world.job.status.workspace_commit == COMMIT
    world.objects.pop((PODS.plural, "train-sync-0"))
    fail_gang(world)
    world.pass_time(hours=1)
    world.settle()
    assert world.job.status.workspace_commit == COMMIT
    assert sync_pods(world) == ["train-sync-0"], "it uses the existing claim"
    assert environment(world, 0)["TORCHRUN_SYNC_COMMIT"] == COMMIT


def test_a_temporary_failure_is_retried_later():
    world = fetching()
    end(world, reason="SecretNotFound", message="Secret login is missing", permanent=False)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "SecretNotFound")
    assert sync_pods(world) == ["train-sync-0"]
    world.pass_time(seconds=10)
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-1"


def test_an_oom_kill_of_the_sync_pod_is_reported():
    world = fetching()
    world.end_container(
        "train-sync-0", names.SYNC_CONTAINER, reason="OOMKilled", finished_at=world.now
    )
    world.settle()
    assert world.job.status.reason == "OOMKilled"


@pytest.mark.parametrize("how", ["spec", "secret", "request"])
def test_a_permanent_failure_waits_for_a_fix(how):
    world = fetching()
    end(world, reason="InvalidFile", message="'a' is a link", permanent=True)
    world.settle()
    world.pass_time(hours=5)
    world.settle()
    status = world.job.status
    assert (status.phase, status.reason) == ("Syncing", "InvalidFile")
    assert "spec.volumes.workspace" in status.message
    assert "kubectl torchrun sync train" in status.message
    assert sync_pods(world) == ["train-sync-0"]
    if how == "request":
        request(world, "2026-01-02T08:00:00Z")
    else:
        fix_source(
            world, **({"ref": "fixed"} if how == "spec" else {"secretRef": {"name": "other"}})
        )
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-1"
    assert environment(world, 1)["TORCHRUN_SYNC_REF"] == ("fixed" if how == "spec" else "main")


def test_a_changed_source_replaces_the_sync_pod():
    world = fetching()
    world.pod("train-sync-0", phase="Running")
    fix_source(world, ref="other")
    assert world.step().deletes[0].name == "train-sync-0"
    world.settle()
    assert environment(world, 0)["TORCHRUN_SYNC_REF"] == "other"


def test_a_lost_claim_is_filled_with_the_same_commit():
    world = running(fetching())
    world.pass_time(hours=1)
    world.objects.pop((CLAIMS.plural, "train-workspace"))
    fail_gang(world)
    world.pass_time(hours=1)
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-1"
    assert environment(world, 1)["TORCHRUN_SYNC_COMMIT"] == COMMIT
    end(world, reason="FetchFailed", message="no")
    world.pass_time(hours=1)
    world.settle()
    assert environment(world, 2)["TORCHRUN_SYNC_COMMIT"] == COMMIT, "a retry is no request"
    assert "TORCHRUN_SYNC_COMMIT" not in environment(world, 0)


def test_a_sync_request_reaches_running_workers():
    world = running(fetching())
    request(world, "now")
    world.settle()
    assert sync_pods(world) == ["train-sync-0", "train-sync-1"]
    assert "TORCHRUN_SYNC_COMMIT" not in environment(world, 1)
    waits = world.condition("WorkspaceUpToDate")
    assert (waits.status, waits.reason) == ("Unknown", "SyncPodStarting")
    status = world.job.status
    assert (world.phase, status.workspace_commit, status.workspace_revision) == (
        "Running",
        COMMIT,
        1,
    )
    uids = [pod.metadata.uid for pod in world.workers()]
    end(world, commit="d" * 40, revision=2)
    world.step()
    up_to_date = world.condition("WorkspaceUpToDate")
    assert (up_to_date.status, up_to_date.reason) == ("Unknown", "Reloading"), (
        "until the status has the request"
    )
    world.settle()
    status = world.job.status
    assert (status.workspace_commit, status.workspace_revision) == ("d" * 40, 2)
    assert [pod.metadata.annotations.revision for pod in world.workers()] == ["2"]
    assert [pod.metadata.uid for pod in world.workers()] == uids
    assert (status.attempt, status.restarts) == (0, 0)
    assert all(c.type != "WorkspaceUpToDate" for c in status.conditions)


@pytest.mark.parametrize("permanent", [False, True])
def test_a_failed_fetch_is_reported_and_does_not_touch_the_gang(permanent):
    world = running(fetching())
    request(world, "now")
    world.settle()
    end(world, reason="SourceNotFound", message="there is no main", permanent=permanent)
    plan = world.settle()
    assert world.phase == "Running"
    up_to_date = world.condition("WorkspaceUpToDate")
    assert (up_to_date.status, up_to_date.reason) == ("False", "SourceNotFound")
    assert "there is no main" in up_to_date.message
    assert "continue with revision 1" in up_to_date.message
    events = [e for p in world.plans for e in p.events if e.reason == "SourceNotFound"]
    assert [event.type for event in events] == ["Warning"]
    assert world.job.status.workspace_commit == COMMIT
    assert plan.requeue_after == (None if permanent else 10)
    world.pass_time(seconds=10)
    if permanent:
        request(world, "again")
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-2"
    assert "TORCHRUN_SYNC_COMMIT" not in environment(world, 2), "the old content is not requested"
    end(world, commit="d" * 40, revision=2)
    world.settle()
    assert world.job.status.workspace_commit == "d" * 40


def test_a_gang_that_fails_meanwhile_restarts_with_its_revision():
    world = running(fetching())
    request(world, "now")
    world.settle()
    for _ in range(4):
        end(world, reason="SourceNotFound", message="there is no main")
        world.settle()
        world.pass_time(minutes=5)
        world.settle()
    assert "train-sync-0" in sync_pods(world), "the last good commit stays"
    end(world, reason="SourceNotFound", message="there is no main")
    fail_gang(world)
    world.pass_time(seconds=1)
    world.settle()
    assert world.observed().gang.child_jobs[-1].metadata.name == "train-r1"
    assert world.job.status.workspace_commit == COMMIT


def test_the_first_workers_wait_for_the_requested_content():
    world = fetching()
    end(world, commit=COMMIT, revision=1)
    fix_source(world, ref="other")
    world.queue = None
    world.settle()
    world.queue = make_queue()
    world.settle()
    end(world, reason="SourceNotFound", message="there is no other")
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "SourceNotFound")


def test_a_sync_request_without_sync_pods_is_handled():
    world = running(fetching())
    world.vanish("train-sync-0")
    request(world, "now")
    world.settle()
    assert sync_pods(world) == ["train-sync-0"]
    end(world, commit="d" * 40, revision=2)
    world.settle()
    assert world.job.status.workspace_commit == "d" * 40


def test_a_sync_pod_on_a_lost_node_is_replaced():
    world = fetching()
    world.node("node-1")
    world.pod("train-sync-0", phase="Running")
    world.settle()
    world.node("node-1", False)
    assert world.settle().requeue_after == 40
    world.pass_time(seconds=40)
    plan = world.step()
    assert [apply.name for apply in plan.applies] == ["train-sync-1"]
    assert [gone.name for gone in plan.deletes] == ["train-sync-0"]
    assert world.job.status.reason == "SyncPodLost"
    assert "Machine node-1 of pod train-sync-0 is NotReady" in world.job.status.message


def test_a_sync_pod_that_cannot_end_on_its_lost_node_is_not_waited_for():
    world = fetching()
    world.node("node-1", False)
    world.pod("train-sync-0", phase="Running")
    world._ending((PODS.plural, "train-sync-0"), 30)
    world.settle()
    assert world.job.status.reason == "Replacing"
    world.pass_time(seconds=40)
    plan = world.step()
    assert [apply.name for apply in plan.applies] == ["train-sync-1"]
    assert plan.deletes == ()


def test_an_existing_claim_needs_no_sync_pod():
    world = World(
        make_job(numNodes=1, volumes={"workspace": {"source": "existing", "claimName": "code"}}),
        make_queue(),
    )
    world.settle()
    assert world.phase == "Queued"
    assert sync_pods(world) == []
    assert all(key[0] != CLAIMS.plural for key in world.created)
    condition = world.condition("WorkspaceReady")
    assert (condition.status, condition.reason) == ("True", "Existing")
    assert "PVC code" in condition.message
