"""Newer code for gangs with a serve pod: it comes from a second serve pod."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import ContainerState, ContainerStatus, StateTerminated
from torchrun_api.kinds.resources import PODS
from world import World, make_job, make_queue

FIRST, SECOND = "10.0.0.7", "10.0.0.8"
COMMIT = "c0ffee" + "0" * 34


def annotate(world: World, **values: str) -> None:
    added = {f"torchrun.ai/{key.replace('_', '-')}": value for key, value in values.items()}
    meta = world.job.metadata
    world.job = replace(world.job, metadata=replace(meta, annotations=meta.annotations | added))


def body(world: World, name: str) -> Any:
    applies = [a for plan in world.plans for a in plan.applies if a.kind is PODS and not a.uid]
    return next(a.body for a in reversed(applies) if a.name == name)


def variables(world: World, name: str) -> dict[str, str]:
    return {
        v["name"]: v.get("value", "") for v in body(world, name)["spec"]["containers"][0]["env"]
    }


def pods(world: World) -> list[str]:
    return [pod.metadata.name for pod in world.observed().workspace.sync_pods]


def served_revisions(world: World) -> set[tuple[str, str]]:
    annotations = [pod.metadata.annotations for pod in world.workers()]
    return {(s.revision, s.served.partition(" ")[0]) for s in annotations}


def running(source: str = "zip", *, bound: bool = False, **spec: Any) -> World:
    """A gang whose serve pod uses its own storage or a bound PVC."""
    workspace = {"source": source, "delivery": "direct"}
    if source == "git":
        workspace["url"] = "https://git.example/train"
    world = World(make_job(numNodes=2, volumes={"workspace": workspace}, **spec), make_queue())
    if source == "zip":
        annotate(world, workspace_sha256="a" * 64, upload_token_sha256="e" * 64)
    world.step()
    world.claim_is("Bound" if bound else "Pending")
    world.pass_time(seconds=30)
    world.settle()
    serves(world, FIRST, 1, "a" * 64, COMMIT if source == "git" else "")
    world.all_workers("Running")
    world.settle()
    assert (world.phase, served_revisions(world)) == ("Running", {("1", f"http://{FIRST}:8081")})
    return world


def serves(world: World, ip: str, revision: int, sha256: str, commit: str = "") -> None:
    result = {"sha256": sha256, **({"commit": commit} if commit else {})}
    world.serves(ip, f"{revision}" * 64, revision, **result)
    world.settle()


@pytest.mark.parametrize("bound", [False, True])
def test_newer_code_comes_from_a_second_serve_pod(bound: bool) -> None:
    world = running(bound=bound)
    assert world.job.status.workspace_revision == 1
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert pods(world) == ["train-serve-0", "train-serve-1"]
    spec = body(world, "train-serve-1")["spec"]
    assert ("affinity" in spec) == bound, "the PVC can be mounted on the same node"
    if bound:
        selector = spec["affinity"]["nodeAffinity"]
        term = selector["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
        assert term["matchFields"][0]["values"] == ["node-1"]
    assert variables(world, "train-serve-1")["TORCHRUN_SYNC_LAST_REVISION"] == "1"
    assert "TORCHRUN_SYNC_AFTER" not in variables(world, "train-serve-1")
    assert names.AFTER_REVISION not in body(world, "train-serve-1")["metadata"]["annotations"]
    annotate(world, workspace_revision="2")  # confirmed by the plugin before the pod serves
    world.settle()
    assert served_revisions(world) == {("1", f"http://{FIRST}:8081")}
    uids = [pod.metadata.uid for pod in world.workers()]
    serves(world, SECOND, 2, "b" * 64)
    assert served_revisions(world) == {("2", f"http://{SECOND}:8081")}
    assert [pod.metadata.uid for pod in world.workers()] == uids
    assert pods(world) == ["train-serve-1"], "the other pod is not needed"
    status = world.job.status
    assert (status.workspace_revision, status.attempt, status.restarts) == (2, 0, 0)


def unrecorded(delivery: str) -> World:
    """A gang whose controller died before it wrote a status."""
    workspace = {"source": "zip", "delivery": delivery}
    world = World(make_job(numNodes=2, volumes={"workspace": workspace}), make_queue())
    annotate(world, workspace_sha256="a" * 64, upload_token_sha256="e" * 64)
    world.step()
    world.claim_is("Pending")
    world.pass_time(seconds=30)
    world.settle()
    status = world.job.status
    world.serves(FIRST, "1" * 64, 1, sha256="a" * 64)
    world.step()
    assert world.observed().gang.child_jobs
    world.job = replace(world.job, status=status)
    world.claim_is("Bound")
    return world


@pytest.mark.parametrize("delivery", ["direct", "auto"])
def test_an_unrecorded_gang_keeps_its_serve_pod(delivery: str) -> None:
    world = unrecorded(delivery)
    world.settle()
    assert pods(world) == ["train-serve-0"]
    world.all_workers("Running")
    world.settle()
    assert pods(world) == ["train-serve-0"]
    assert (world.phase, served_revisions(world)) == ("Running", {("1", f"http://{FIRST}:8081")})
    assert world.condition("WorkspaceReady").reason == "DirectDelivery"


def test_a_workspace_that_is_lost_before_any_status_is_not_reported_ready() -> None:
    world = unrecorded("direct")
    world.pod("train-serve-0", phase="Failed")
    world.step()
    assert world.condition("WorkspaceReady").status != "True"


def test_the_older_serve_pod_stays_until_every_worker_is_informed() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    world.pod("train-0-abcde", phase="Succeeded")
    serves(world, SECOND, 2, "b" * 64)
    assert served_revisions(world) == {("1", f"http://{FIRST}:8081")}
    assert pods(world) == ["train-serve-0", "train-serve-1"]


def test_a_failed_fetch_does_not_touch_gang_and_serve_pod() -> None:
    world = running("git")
    assert world.job.status.workspace_commit == COMMIT
    annotate(world, sync_requested="now")
    world.settle()
    assert "TORCHRUN_SYNC_COMMIT" not in variables(world, "train-serve-1")
    termination = StateTerminated(
        exit_code=1, message='{"reason": "SourceNotFound", "message": "no main"}'
    )
    status = ContainerStatus(name="sync", state=ContainerState(terminated=termination))
    world.pod("train-serve-1", phase="Running", container_statuses=(status,))
    world.settle()
    assert pods(world) == ["train-serve-0", "train-serve-1"]
    shown = world.condition("WorkspaceUpToDate")
    assert (shown.status, shown.reason) == ("False", "SourceNotFound")
    assert "no main" in shown.message
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=world.now)
    world.settle()
    world.pass_time(minutes=1)
    world.settle()
    assert world.observed().gang.child_jobs[-1].metadata.name == "train-r1", (
        "with the existing revision"
    )
    assert served_revisions(world) == {("1", f"http://{FIRST}:8081")}
    serves(world, SECOND, 2, "", "d" * 40)
    assert world.job.status.workspace_commit == "d" * 40


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("source", ["zip", "git"])
def test_a_pod_on_a_lost_node_is_replaced_while_the_gang_runs(source: str, bound: bool) -> None:
    world = running(source, bound=bound)
    world.node("node-1")
    world.place("train-serve-0", "node-2")
    world.node("node-2", False)
    world.pass_time(seconds=40)
    world.settle()
    assert pods(world) == ["train-serve-0", "train-serve-1"]
    terminating = [p.metadata.terminating for p in world.observed().workspace.sync_pods]
    assert terminating == [True, False]
    assert "affinity" not in body(world, "train-serve-1")["spec"], "the lost machine takes no pods"
    assert world.phase == "Running"
    world.node("node-2")
    world.settle()
    assert pods(world) == ["train-serve-0", "train-serve-1"]
    world.containers_stop()
    assert pods(world) == ["train-serve-1"]
    world.place("train-serve-1", "node-1")
    world.pod("train-serve-1", phase="Running")
    world.settle()
    shown = [c for c in world.job.status.conditions if c.type == "WorkspaceUpToDate"]
    if source == "git":
        assert variables(world, "train-serve-1")["TORCHRUN_SYNC_COMMIT"] == COMMIT
        assert [(c.status, c.reason) for c in shown] == [("Unknown", "Fetching")]
    elif bound:
        assert not shown, "the PVC has the upload"
    else:
        assert [(c.status, c.reason) for c in shown] == [("False", "WorkspaceLost")]
        assert "kubectl torchrun sync train" in shown[0].message
    serves(world, SECOND, 2, "a" * 64, COMMIT if source == "git" else "")
    assert served_revisions(world) == {("2", f"http://{SECOND}:8081")}
    assert all(c.type != "WorkspaceUpToDate" for c in world.job.status.conditions)


def lose_the_node(world: World) -> None:
    world.node("node-2", False, "node.kubernetes.io/out-of-service")


def delete_the_node(world: World) -> None:
    world.vanish("train-serve-0")
    world.nodes = {name: node for name, node in (world.nodes or {}).items() if name != "node-2"}


def evict_the_first_pod(world: World) -> None:
    evict(world, "train-serve-0")


@pytest.mark.parametrize("end", [lose_the_node, delete_the_node, evict_the_first_pod])
def test_a_pod_without_a_node_no_longer_waits_for_the_node_of_a_pod_that_is_lost(
    end: Callable[[World], None],
) -> None:
    world = running("git", bound=True)
    world.node("node-1")
    world.node("node-2")
    world.place("train-serve-0", "node-2")
    annotate(world, sync_requested="now")
    world.settle()
    assert pods(world) == ["train-serve-0", "train-serve-1"]
    assert "affinity" in body(world, "train-serve-1")["spec"]
    waiting = world.observed().workspace.sync_pods[-1].metadata.uid
    end(world)
    plan = world.step()
    assert [delete.uid for delete in plan.deletes] == [waiting]
    shown = world.condition("WorkspaceUpToDate")
    assert shown.reason == "Replacing"
    assert (
        "Pod train-serve-1 is assigned to a machine where no other pod mounts PVC" in shown.message
    )
    world.settle()
    latest = world.observed().workspace.sync_pods[-1].metadata
    assert "affinity" not in body(world, latest.name)["spec"]
    world.pass_time(hours=1)
    world.settle()
    assert world.observed().workspace.sync_pods[-1].metadata.uid == latest.uid


def evict(world: World, name: str) -> None:
    world.pod(name, phase="Failed", reason="Evicted", message="low on ephemeral-storage")


def hangs_on_a_lost_node(world: World, name: str) -> None:
    """Another client has deleted the pod, too."""
    world.node("node-1")
    world.place(name, "node-2")
    world.node("node-2", False)
    world.drain(name)


@pytest.mark.parametrize("lose", [evict, hangs_on_a_lost_node])
def test_the_loss_of_a_serve_pod_requests_no_newer_code(
    lose: Callable[[World, str], None],
) -> None:
    world = running("git")
    assert "TORCHRUN_SYNC_COMMIT" not in variables(world, "train-serve-0")
    lose(world, "train-serve-0")
    world.settle()
    world.pass_time(seconds=60)
    world.settle()
    assert variables(world, "train-serve-1")["TORCHRUN_SYNC_COMMIT"] == COMMIT


def test_a_requested_commit_survives_the_pod_that_fetched_it() -> None:
    world = running("git")
    annotate(world, sync_requested="now")
    world.settle()
    world.end_container("train-serve-1", "sync", exit_code=1, finished_at=world.now)
    world.settle()
    world.pass_time(seconds=60)
    world.settle()
    assert "TORCHRUN_SYNC_COMMIT" not in variables(world, "train-serve-2"), "it has fetched nothing"
    world.serves(SECOND, "2" * 64, 2, commit="d" * 40)
    evict(world, "train-serve-2")
    world.settle()
    world.pass_time(seconds=60)
    world.settle()
    assert world.job.status.workspace_commit == COMMIT, "the workers have not got the newer code"
    assert variables(world, "train-serve-3")["TORCHRUN_SYNC_COMMIT"] == "d" * 40


def test_a_restarted_serve_pod_is_not_announced() -> None:
    world = running()
    starts = ContainerStatus(name="serve")
    ended = ContainerStatus(
        name="sync",
        state=ContainerState(terminated=StateTerminated(message='{"revision": 2}')),
    )
    world.pod("train-serve-0", container_statuses=(starts, ended))
    world.settle()
    assert world.phase == "Running"
    assert served_revisions(world) == {("1", f"http://{FIRST}:8081")}
    assert pods(world) == ["train-serve-0"]


def test_a_lost_upload_is_requested_for_the_next_gang() -> None:
    world = running()
    world.vanish("train-serve-0")
    world.settle()
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=world.now)
    world.pod("train-serve-0", phase="Running")
    world.settle()
    world.pass_time(minutes=1)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "WorkspaceLost")
    assert "kubectl torchrun sync train" in world.job.status.message


@pytest.mark.parametrize("bound", [False, True])
def test_development_keeps_a_standby_serve_pod(bound: bool) -> None:
    world = running(bound=bound, development=True)
    assert pods(world) == ["train-serve-0", "train-serve-1"]
    assert variables(world, "train-serve-1")["TORCHRUN_SYNC_AFTER"] == "1"
    assert "TORCHRUN_SYNC_SHA256" not in variables(world, "train-serve-1")
    world.pod("train-serve-1", phase="Running")
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    assert pods(world) == ["train-serve-0", "train-serve-1"], "the pod accepts any upload"
    serves(world, SECOND, 2, "b" * 64)
    assert served_revisions(world) == {("2", f"http://{SECOND}:8081")}
    assert pods(world) == ["train-serve-1", "train-serve-2"]
    world.spec(development=False)
    world.settle()
    assert pods(world) == ["train-serve-1"]


def test_no_newer_code_without_the_queue() -> None:
    world = running()
    annotate(world, workspace_sha256="b" * 64)
    world.queue = None
    world.settle()
    assert pods(world) == ["train-serve-0"]
    world.queue = make_queue()
    workspace = replace(world.job.spec.volumes.workspace, delivery="shared")
    world.spec(volumes=replace(world.job.spec.volumes, workspace=workspace))
    world.settle()
    assert pods(world) == ["train-serve-0"], "its workers need the pod until they end"


def test_a_resize_that_waits_for_the_workspace_creates_one_pod() -> None:
    world = running(elastic={"minNodes": 1, "maxNodes": 3})
    world.vanish("train-serve-0")
    world.spec(num_nodes=3)
    new_pods = [
        apply.name for apply in world.step().applies if apply.kind is PODS and not apply.uid
    ]
    assert new_pods == ["train-serve-0"]
