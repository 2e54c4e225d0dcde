"""The setup pod: one for each content, before the gang, without a loop of failures."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import ContainerState, ContainerStatus, StateWaiting
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, PODS
from world import ZIP, World, make_job, make_queue

DIGEST = {"torchrun.ai/workspace-sha256": "ab" * 32}


def ready_for_setup(**spec) -> World:
    spec = {"numNodes": 1, "volumes": ZIP, "setupCommand": "make", **spec}
    world = World(make_job(annotations_=DIGEST, **spec), make_queue())
    world.step()
    world.sync_done()
    world.step()
    return world


def running(**spec) -> World:
    world = ready_for_setup(**spec)
    world.setup_done()
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def setup_pods(world: World) -> list[str]:
    return [name for kind, name in world.created if kind == PODS.plural and "-setup-" in name]


def fail(world: World, **ended) -> None:
    world.end_container(world.observed().workspace.setup_pods[-1].metadata.name, "setup", **ended)


def fail_by_itself(world: World) -> None:
    fail(world, exit_code=2, message='{"reason": "SetupFailed", "message": "no compiler"}')


def fails_the_gang(world: World) -> None:
    world.end_container("train-0-abcde", "trainer", exit_code=1)
    world.settle()
    world.pass_time(minutes=10)
    world.settle()


def test_the_gang_waits_for_the_setup():
    world = ready_for_setup()
    assert setup_pods(world) == ["train-setup-0"]
    assert (world.phase, world.job.status.reason) == ("Syncing", "SetupRunning")
    world.settle()
    assert "is starting" in world.job.status.message
    world.pod("train-setup-0", phase="Running")
    world.settle()
    assert "kubectl logs -f train-setup-0" in world.job.status.message
    assert (JOBS.plural, "train") not in world.created
    world.setup_done()
    world.settle()
    assert (JOBS.plural, "train") in world.created


def test_a_restart_uses_the_existing_environment():
    world = running()
    fails_the_gang(world)
    assert (JOBS.plural, "train-r1") in world.created
    assert setup_pods(world) == ["train-setup-0"]


@pytest.mark.parametrize(
    "change",
    [
        {"setup_command": "make all"},
        {"setup_command": ("make",)},
        {"requirements": ("einops",)},
        {"image": "other"},
        {"working_dir": "/app/b"},
    ],
    ids=["line", "list", "requirements", "image", "working directory"],
)
def test_a_restart_with_other_content_runs_the_setup_again(change):
    world = running()
    world.spec(**change)
    world.settle()
    assert setup_pods(world) == ["train-setup-0"], "no setup while the gang runs"
    fails_the_gang(world)
    assert setup_pods(world) == ["train-setup-0", "train-setup-1"]
    assert (JOBS.plural, "train-r1") not in world.created
    world.setup_done()
    world.settle()
    assert (JOBS.plural, "train-r1") in world.created


def test_a_running_setup_is_replaced_when_the_spec_changes():
    world = ready_for_setup()
    world.spec(setup_command="make all")
    plan = world.step()
    assert [delete.name for delete in plan.deletes] == ["train-setup-0"]
    assert world.job.status.reason == "Replacing"
    world.settle()
    assert len(world.observed().workspace.setup_pods) == 1
    assert "make all" in str(world.plans[-2].applies or world.plans[-3].applies)


def test_a_terminating_setup_pod_is_waited_for():
    world = ready_for_setup()
    world._ending((PODS.plural, "train-setup-0"), 30)
    world.settle()
    assert world.job.status.reason == "Replacing"
    world.containers_stop()
    world.settle()
    assert setup_pods(world) == ["train-setup-0", "train-setup-0"]


def test_a_failed_command_waits_for_a_change():
    world = ready_for_setup()
    fail_by_itself(world)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "SetupFailed")
    assert "no compiler" in world.job.status.message
    assert "kubectl delete pod train-setup-0" in world.job.status.message
    world.pass_time(hours=5)
    world.settle()
    assert setup_pods(world) == ["train-setup-0"]
    world.resume()
    assert setup_pods(world) == ["train-setup-0", "train-setup-1"], "any change of the spec"
    fail_by_itself(world)
    world.settle()
    world.spec(setup_command="make fixed")
    world.settle()
    world.setup_done()
    world.settle()
    assert (JOBS.plural, "train") in world.created
    assert len(world.observed().workspace.setup_pods) == 2, "the last pods stay"


@pytest.mark.parametrize(
    ("reason", "message", "words"),
    [("OOMKilled", "", "OOMKilled"), ("StartError", "exec: python3: not found", "python3")],
)
def test_the_reason_of_the_kubelet_is_reported(reason, message, words):
    world = ready_for_setup()
    fail(world, exit_code=137, reason=reason, message=message)
    world.settle()
    assert world.job.status.reason == "SetupFailed"
    assert words in world.job.status.message
    world.pass_time(hours=1)
    world.settle()
    assert len(setup_pods(world)) == 1


def evicted(world: World) -> None:
    fail_by_itself(world)
    world.pod("train-setup-0", reason="Evicted", message="the node was low on memory")


def drained(world: World) -> None:
    fail(world, exit_code=143, message='{"reason": "Stopped", "message": "by SIGTERM"}')
    condition = Condition(type="DisruptionTarget", status="True", reason="EvictionByEvictionAPI")
    world.pod("train-setup-0", conditions=(condition,))


def claim_is_gone(world: World) -> None:
    fail(
        world,
        exit_code=125,
        finished_at=world.now,
        message='{"reason": "EnvironmentNotReady", "message": "no space left"}',
    )


@pytest.mark.parametrize("harm", [evicted, drained, claim_is_gone])
def test_disruptions_of_the_setup_are_retried_with_delays(harm):
    world = ready_for_setup()
    harm(world)
    plan = world.settle()
    assert plan.requeue_after == 10
    assert "Retrying 10 s after" in world.job.status.message
    world.pass_time(seconds=10)
    world.settle()
    assert setup_pods(world) == ["train-setup-0", "train-setup-1"]


def test_the_delays_of_a_setup_count_from_the_last_one_that_succeeded():
    world = running()
    world.spec(setup_command="make all")
    fails_the_gang(world)
    for number, seconds in ((1, 10), (2, 20), (3, 40)):
        assert setup_pods(world)[-1] == f"train-setup-{number}"
        claim_is_gone(world)
        assert world.settle().requeue_after == seconds
        world.pass_time(seconds=seconds)
        world.settle()


def test_a_setup_pod_that_does_not_start_has_a_reason():
    world = ready_for_setup()
    waiting = StateWaiting(reason="ErrImagePull", message="no such image")
    status = ContainerStatus(name="setup", state=ContainerState(waiting=waiting))
    world.pod("train-setup-0", phase="Pending", container_statuses=(status,))
    world.settle()
    assert world.job.status.reason == "ImagePullFailed"
    assert world.job.status.message.startswith("Pod train-setup-0: ")


def test_the_setup_counts_for_the_sync_timeout():
    world = ready_for_setup(reliability={"syncTimeoutSeconds": 60})
    world.pod("train-setup-0", phase="Running")
    world.settle()
    world.pass_time(seconds=61)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "SyncTimeout")
    assert world.observed().workspace.setup_pods == ()


def test_a_suspension_deletes_the_setup_pod_and_a_resume_starts_it_again():
    world = ready_for_setup()
    world.spec(suspend=True)
    world.settle()
    assert (world.phase, world.observed().workspace.setup_pods) == ("Suspended", ())
    world.resume()
    assert world.job.status.reason == "SetupRunning"


def lost() -> World:
    """The setup pod runs on node-1, which has been NotReady for long enough."""
    world = ready_for_setup()
    world.node("node-1")
    world.place("train-setup-0", "node-1")
    world.pod("train-setup-0", phase="Running")
    world.settle()
    world.node("node-1", False)
    assert world.settle().requeue_after == 40
    world.pass_time(seconds=40)
    world.settle()
    return world


def test_a_setup_pod_on_a_lost_node_is_deleted_and_waited_for():
    world = lost()
    assert (world.phase, world.job.status.reason) == ("Syncing", "SetupPodLost")
    assert world.job.status.message == (
        "Machine node-1 of pod train-setup-0 is NotReady since 2026-01-02T03:04:05Z. The pod may still"
        " run there and write to the workspace PVC. The next setup pod starts when the machine returns,"
        " or when you confirm that it is off (kubectl taint nodes node-1"
        " node.kubernetes.io/out-of-service=nodeshutdown:NoExecute)."
    )
    assert [event.type for event in world.plans[-2].events] == ["Warning"]
    assert [delete.name for delete in world.plans[-2].deletes] == ["train-setup-0"]
    world.pass_time(days=1)
    world.containers_stop()
    assert world.settle().deletes == ()
    assert setup_pods(world) == ["train-setup-0"]
    assert world.job.status.reason == "SetupPodLost"


def test_a_setup_pod_on_a_machine_that_is_off_is_replaced():
    world = lost()
    world.node("node-1", False, "node.kubernetes.io/out-of-service")
    plan = world.step()
    assert (plan.deletes, world.job.status.message) == (
        (),
        "Machine node-1 of pod train-setup-0 has the taint out-of-service. Replacing the pod.",
    )
    assert setup_pods(world) == ["train-setup-0", "train-setup-1"]
    world.settle()
    assert world.job.status.message == "Pod train-setup-1 is starting."
    world.setup_done()
    world.settle()
    assert (JOBS.plural, "train") in world.created


def test_a_setup_pod_that_is_not_terminating_is_deleted_with_its_replacement():
    world = ready_for_setup()
    world.node("node-1", False, "node.kubernetes.io/out-of-service")
    world.place("train-setup-0", "node-1")
    plan = world.step()
    assert [delete.name for delete in plan.deletes] == ["train-setup-0"]
    assert setup_pods(world) == ["train-setup-0", "train-setup-1"]


def test_a_setup_pod_is_replaced_once_its_node_is_back_and_has_ended_it():
    world = lost()
    world.node("node-1")
    world.settle()
    assert world.job.status.reason == "Replacing"
    world.containers_stop()
    world.settle()
    assert len(setup_pods(world)) == 2


def test_a_setup_pod_of_a_deleted_node_is_replaced_once_it_is_gone():
    world = lost()
    assert world.nodes is not None
    del world.nodes["node-1"]
    world.settle()
    assert world.job.status.reason == "SetupPodLost"
    assert world.job.status.message == (
        "Machine node-1 of pod train-setup-0 was deleted, but its containers may still run. The pod may"
        " still write to the workspace PVC. The next setup pod starts when Kubernetes has deleted"
        " this one. If the machine is off, you can run: kubectl delete pod train-setup-0 -n ml"
        " --force"
    )
    world.vanish("train-setup-0")
    world.settle()
    assert len(setup_pods(world)) == 2


def test_a_pause_does_not_wait_for_a_setup_pod_on_a_lost_node_but_the_next_setup_does():
    world = lost()
    world.spec(suspend=True)
    world.settle()
    assert world.phase == "Suspended"
    world.spec(suspend=False)
    world.settle()
    assert (setup_pods(world), world.job.status.reason) == (["train-setup-0"], "SetupPodLost")


def test_without_a_claim_every_worker_runs_the_setup():
    world = World(make_job(numNodes=1, requirements=["einops"]), make_queue())
    world.settle()
    assert setup_pods(world) == []
    assert (JOBS.plural, "train") in world.created
    assert "Each pod runs the setup" in world.condition("WorkspaceReady").message


def test_the_setup_follows_the_content_that_the_sync_pod_reports():
    world = World(make_job(numNodes=1, volumes=ZIP, setupCommand="make"), make_queue())
    world.step()
    world.end_container("train-sync-0", "sync", message='{"sha256": "aa"}')
    world.pod("train-sync-0", phase="Succeeded")
    world.step()
    first = world.observed().workspace.setup_pods[-1].metadata.annotations.setup_key
    world.end_container("train-sync-0", "sync", message='{"sha256": "bb"}')
    world.pod("train-sync-0", phase="Succeeded")
    world.settle()
    assert world.observed().workspace.setup_pods[-1].metadata.annotations.setup_key != first


@pytest.mark.parametrize(("other", "same"), [("aa", True), ("bb", False)])
def test_the_setup_follows_the_files_and_not_the_commit(other, same):
    """Two directories of a repository have the same commit, and two commits can have one tree."""

    def setup_key(sub_path: str, sha256: str) -> str:
        workspace = {"source": "git", "url": "https://example.com/a.git", "subPath": sub_path}
        job = make_job(numNodes=1, volumes={"workspace": workspace}, requirements=["-r r.txt"])
        world = World(job, make_queue())
        world.step()
        message = f'{{"sha256": "{sha256}", "commit": "{"c" * 40}"}}'
        world.end_container("train-sync-0", "sync", message=message)
        world.pod("train-sync-0", phase="Succeeded")
        world.settle()
        return world.observed().workspace.setup_pods[-1].metadata.annotations.setup_key

    assert (setup_key("a", "aa") == setup_key("b", other)) is same


def test_variables_of_the_setup_are_reserved():
    env = [{"name": "TORCHRUN_ENV_DIR", "value": "/mine"}]
    world = World(make_job(numNodes=1, env=env, setupCommand="make"), make_queue())
    world.settle()
    assert world.job.status.reason == "InvalidSpec"
    assert "TORCHRUN_ENV_DIR" in world.job.status.message


def announce(world: World, digest: str) -> None:
    """The user runs `kubectl torchrun sync` with other code."""
    annotations = {"torchrun.ai/workspace-sha256": digest}
    world.job = replace(world.job, metadata=replace(world.job.metadata, annotations=annotations))
    world.settle()


def setup_keys(world: World) -> list[str]:
    pods = world.observed().workspace.setup_pods
    return [pod.metadata.annotations.setup_key for pod in pods]


def test_a_gang_with_the_previous_code_has_the_environment_of_that_code():
    world = running()
    announce(world, "cd" * 32)
    world.end_container("train-sync-1", "sync", exit_code=137, finished_at=world.now)
    world.settle()
    world.end_container("train-0-abcde", "trainer", exit_code=1)
    world.settle()
    world.pass_time(seconds=60)
    world.settle()
    assert (JOBS.plural, "train-r1") in world.created
    assert setup_pods(world) == ["train-setup-0"]
    world.all_workers("Running")
    world.settle()
    world.sync_done()
    world.settle()
    world.end_container("train-r1-0-abcde", "trainer", exit_code=1)
    world.settle()
    world.pass_time(seconds=60)
    world.settle()
    assert setup_pods(world) == ["train-setup-0", "train-setup-1"]
    assert len(set(setup_keys(world))) == 2
    assert (JOBS.plural, "train-r2") not in world.created
