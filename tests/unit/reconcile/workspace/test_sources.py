"""Sources that the sync pod fetches by itself, and a claim that is there already."""

import msgspec
import pytest

from torchrun_api import names
from torchrun_api.kinds import CLAIMS, PODS
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
    return [pod.metadata.name for pod in world.observed().sync_pods]


def end(world, **said):
    pod = world.observed().sync_pods[-1].metadata.name
    message = msgspec.json.encode(said).decode()
    world.end_container(pod, names.SYNC_CONTAINER, message=message, finished_at=world.now)
    if "commit" in said:
        world.pod(pod, phase="Succeeded")


def running(world):
    end(world, commit=COMMIT, files=1)
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


def mend(world, **workspace):
    volumes = {"workspace": GIT | workspace}
    world.spec(volumes=make_job(volumes=volumes).spec.volumes)


def fail_gang(world):
    worker = world.workers()[0].metadata.name
    world.end_container(worker, names.TRAINER_CONTAINER, exit_code=1, finished_at=world.now)
    world.settle()


def test_a_fetch_says_what_it_fetches_without_its_user():
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
    assert sync_pods(world) == []


def test_a_failure_that_may_pass_is_tried_again_later():
    world = fetching()
    end(world, reason="SecretNotFound", message="Secret login is missing", permanent=False)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "SecretNotFound")
    assert sync_pods(world) == ["train-sync-0"]
    world.pass_time(seconds=10)
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-1"


def test_a_pod_that_ran_out_of_memory_is_said_to_have():
    world = fetching()
    world.end_container(
        "train-sync-0", names.SYNC_CONTAINER, reason="OOMKilled", finished_at=world.now
    )
    world.settle()
    assert world.job.status.reason == "OOMKilled"


@pytest.mark.parametrize("how", ["spec", "secret", "request"])
def test_a_failure_for_good_waits_for_its_mending(how):
    world = fetching()
    end(world, reason="UnsafeMember", message="'a' is a link", permanent=True)
    world.settle()
    world.pass_time(hours=5)
    world.settle()
    status = world.job.status
    assert (status.phase, status.reason) == ("Syncing", "UnsafeMember")
    assert "spec.volumes.workspace" in status.message
    assert "kubectl torchrun sync train" in status.message
    assert sync_pods(world) == ["train-sync-0"]
    if how == "request":
        request(world, "2026-01-02T08:00:00Z")
    else:
        mend(world, **({"ref": "mended"} if how == "spec" else {"secretRef": {"name": "other"}}))
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-1"
    assert environment(world, 1)["TORCHRUN_SYNC_REF"] == ("mended" if how == "spec" else "main")


def test_a_changed_source_replaces_the_pod_that_fetches_the_old_one():
    world = fetching()
    world.pod("train-sync-0", phase="Running")
    mend(world, ref="other")
    assert world.step().deletes[0].name == "train-sync-0"
    world.settle()
    assert environment(world, 0)["TORCHRUN_SYNC_REF"] == "other"


def test_a_lost_claim_is_filled_with_the_same_commit_again():
    world = running(fetching())
    world.objects.pop((CLAIMS.plural, "train-workspace"))
    fail_gang(world)
    world.pass_time(hours=1)
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-1"
    assert environment(world, 1)["TORCHRUN_SYNC_COMMIT"] == COMMIT
    assert "TORCHRUN_SYNC_COMMIT" not in environment(world, 0)


def test_a_request_gives_the_next_gang_what_the_ref_means_by_then():
    world = running(fetching())
    request(world, "now")
    world.settle()
    assert sync_pods(world) == ["train-sync-0"], "a gang that lives keeps its code"
    fail_gang(world)
    world.pass_time(hours=1)
    world.settle()
    assert sync_pods(world)[-1] == "train-sync-1"
    assert "TORCHRUN_SYNC_COMMIT" not in environment(world, 1)
    assert len(world.workers()) == 0 or world.phase == "Syncing"
    end(world, commit="d" * 40)
    world.settle()
    assert world.job.status.workspace_commit == "d" * 40


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
    assert "claim code" in condition.message
