"""The fence: a new gang never trains beside workers of an old gang that may still run."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import Node, NodeMeta
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_controller.reconcile.gang.fence import blocking_pods, format_time
from torchrun_controller.reconcile.gang.gate import REPEAT_SECONDS
from unit.reconcile.losing import OUT_OF_SERVICE, begin, lose, replaced, running, started
from world import World, make_queue


def collected(world: World, pod: str) -> None:
    """The pod garbage collector sets the phase Failed, not the kubelet."""
    gone = Condition(type="DisruptionTarget", status="True", reason="DeletionByPodGC")
    world.pod(pod, phase="Failed", conditions=(gone,))


def given_up() -> World:
    """One node is off. The other worker of the gang, on a healthy node, is being deleted."""
    world = running()
    world.node("node-0", False, OUT_OF_SERVICE)
    world.pass_backoff()
    world.step()
    survivor = world.objects[PODS.plural, "train-1-abcde"]
    assert survivor.metadata.deletion_timestamp is not None
    assert world.job.status.unfenced == ()
    return world


@pytest.mark.parametrize(("attempt", "blocking"), [(0, 0), (1, 2)])
def test_workers_that_run_block_the_next_attempt_alone(attempt: int, blocking: int):
    world = running()
    observed = world.observed()
    found = blocking_pods(observed.gang, observed.cluster.nodes, (), attempt, world.now)
    assert len(found.pods) == blocking


def test_the_new_gang_waits_for_the_fence_with_a_remedy():
    world = replaced()
    status = world.job.status
    assert (world.phase, status.reason) == ("Queued", "WaitingForFence")
    assert "on machine node-1, lost since 2026-01-02T03:04:05Z" in status.message
    assert "kubectl taint nodes node-1 node.kubernetes.io/out-of-service" in status.message
    assert "allowUnfencedRestart" in status.message
    assert [(w.attempt, w.index, w.node) for w in status.unfenced] == [(0, 1, "node-1")]
    assert started(world) == {""}
    assert any(e.reason == "WaitingForFence" for plan in world.plans for e in plan.events)


def test_several_lost_nodes_share_one_message():
    world = running(nodes=3)
    for node in ("node-1", "node-2"):
        world.node(node, False)
    world.pass_time(seconds=40)
    world.settle()
    world.containers_stop()
    world.settle()
    assert "2 pods of the previous attempt" in world.job.status.message
    assert "node-1 and 1 more" in world.job.status.message


def test_pods_that_vanish_with_their_node_prove_nothing():
    world = replaced()
    assert world.nodes is not None
    del world.nodes["node-1"]
    world.vanish("train-1-abcde")
    world.pass_time(days=1)
    world.settle()
    assert world.job.status.reason == "WaitingForFence"
    assert started(world) == {""}


def test_the_garbage_collector_proves_nothing():
    world = running()
    world.pass_time(minutes=1)
    assert world.nodes is not None
    del world.nodes["node-1"]
    collected(world, "train-1-abcde")
    world.settle()
    assert world.job.status.last_failure is not None
    assert world.job.status.last_failure.reason == "NodeLost"
    assert [w.index for w in world.job.status.unfenced] == [1]


def test_without_nodes_a_collected_pod_blocks_nothing():
    """Nothing could release it: the controller may not read nodes."""
    world = running()
    world.nodes = None
    collected(world, "train-1-abcde")
    world.settle()
    assert world.job.status.unfenced == ()


def test_a_collected_pod_that_never_had_a_node_blocks_nothing():
    world = running()
    collected(world, "train-1-abcde")
    world.place("train-1-abcde", "")
    world.settle()
    assert world.job.status.unfenced == ()


def test_the_garbage_collector_proves_nothing_for_a_replaced_gang():
    world = given_up()
    assert world.nodes is not None
    del world.nodes["node-1"]
    collected(world, "train-1-abcde")
    world.settle()
    world.vanish("train-1-abcde")
    world.pass_time(days=1)
    world.settle()
    assert [(w.attempt, w.index, w.node) for w in world.job.status.unfenced] == [(0, 1, "node-1")]
    assert world.job.status.reason == "WaitingForFence"
    assert started(world) == {""}


def test_a_node_that_returned_unseen_gets_time_to_stop_collected_pods():
    world = given_up()
    collected(world, "train-1-abcde")
    world.node("node-1", False)
    world.node("node-1")
    world.settle()
    assert world.job.status.reason == "WaitingForOldGang"
    world.vanish("train-1-abcde")
    world.settle()
    assert started(world) == {""}
    world.pass_time(seconds=60)
    world.settle()
    assert started(world) == {"1"}


@pytest.mark.parametrize("world_of", [running, given_up])
def test_a_pod_deleted_by_force_before_its_node_counts_as_lost_may_still_run(world_of):
    world = world_of()
    world.node("node-1", False)
    world.settle()
    world.vanish("train-1-abcde")
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    world.pass_time(days=1)
    world.containers_stop()
    world.settle()
    assert [(w.attempt, w.index, w.node) for w in world.job.status.unfenced] == [(0, 1, "node-1")]
    assert world.job.status.reason == "WaitingForFence"


def test_a_node_that_has_not_reported_yet_is_not_silent():
    world = running()
    world.nodes = (world.nodes or {}) | {"node-1": Node(metadata=NodeMeta(name="node-1"))}
    world.settle()
    assert world.job.status.unfenced == ()


def test_a_short_silence_of_a_node_is_soon_forgotten():
    world = running()
    world.node("node-1", False)
    world.settle()
    assert world.phase == "Running"
    world.node("node-1")
    world.settle()
    assert (world.phase, world.job.status.unfenced) == ("Running", ())


def test_a_pod_deleted_from_a_ready_node_has_stopped():
    world = given_up()
    world.remove("train-1-abcde")
    assert world.nodes is not None
    del world.nodes["node-1"]
    world.settle()
    assert world.job.status.unfenced == ()
    assert started(world) == {"1"}


def during_a_suspension(world: World) -> None:
    world.spec(suspend=True)
    world.settle()
    world.vanish("train-1-abcde")


def after_a_failure(world: World) -> None:
    world.end_container("train-0-abcde", "trainer", exit_code=1, finished_at=world.now)
    world.settle()
    world.vanish("train-1-abcde")


def during_training(world: World) -> None:
    world.vanish("train-1-abcde")
    world.job_condition("Failed", "BackoffLimitExceeded")


@pytest.mark.parametrize("grace", [30, 600])
@pytest.mark.parametrize("deleted", [during_a_suspension, after_a_failure, during_training])
def test_a_pod_deleted_by_force_may_run_until_the_end_of_its_grace_period(
    deleted: Callable[[World], None], grace: int
) -> None:
    """kubectl delete pod --force: the kubelet keeps the grace period that has begun."""
    world = running(terminationGracePeriodSeconds=grace)
    deleted(world)
    world.settle()
    world.containers_stop()
    world.settle()
    world.suffix = "fghij"
    world.resume()
    begin(world)
    assert [worker.node for worker in world.job.status.unfenced] == ["node-1"]
    assert (world.job.status.reason, started(world)) == ("WaitingForOldGang", {""})
    assert "without a pod in the API" in world.job.status.message
    world.pass_time(seconds=grace + 29)
    world.settle()
    assert started(world) == {""}
    world.pass_time(seconds=1)
    world.settle()
    assert (world.job.status.unfenced, started(world)) == ((), {"1"})


def test_a_pod_deleted_by_force_before_the_gate_opens_blocks_nothing() -> None:
    world = given_up()
    world.settle()
    world.vanish(*(pod.metadata.name for pod in world.workers()))
    world.settle()
    assert [worker.attempt for worker in world.job.status.unfenced] == []


def test_containers_that_ended_before_the_loss_block_nothing():
    world = running()
    world.end_container("train-1-abcde", "trainer", exit_code=3, finished_at=world.now)
    lose(world)
    assert world.job.status.last_failure is not None
    assert world.job.status.last_failure.exit_code == 3
    assert world.job.status.unfenced == ()


def test_unfenced_workers_survive_a_lost_status():
    world = running()
    world.node("node-1", False)
    world.pass_time(seconds=40)
    world.step(writes=1)
    world.vanish("train-1-abcde")
    assert world.nodes is not None
    del world.nodes["node-1"]
    world.settle()
    assert [(w.attempt, w.index) for w in world.job.status.unfenced] == [(0, 1)]
    survivor = world.objects[PODS.plural, "train-0-abcde"]
    assert survivor.metadata.deletion_timestamp is not None, "no other component would delete it"


def test_a_returned_node_reports_the_pods_that_it_knows():
    world = replaced()
    world.node("node-1")
    world.settle()
    assert world.job.status.unfenced == ()
    assert world.job.status.reason == "WaitingForOldGang"
    world.containers_stop()
    world.settle()
    assert started(world) == {"1"}
    assert world.phase == "Running"


def test_a_returned_node_gets_time_to_stop_unknown_pods():
    world = replaced()
    world.vanish("train-1-abcde")
    world.node("node-1")
    assert world.settle().requeue_after == 60
    assert world.job.status.reason == "WaitingForOldGang"
    world.pass_time(seconds=60)
    world.settle()
    assert started(world) == {"1"}


def test_a_returned_node_whose_clock_is_ahead_gets_no_less_time():
    world = replaced()
    world.vanish("train-1-abcde")
    world.pass_time(hours=1)
    world.node("node-1")
    world.pass_time(hours=-1)
    world.settle()
    world.pass_time(seconds=59)
    world.settle()
    assert started(world) == {""}
    world.pass_time(hours=1, seconds=1)
    world.settle()
    assert started(world) == {"1"}


@pytest.mark.parametrize("attempt", [0, None])  # None: of an earlier job
def test_a_pod_of_the_next_attempt_says_nothing_about_an_earlier_worker(attempt: int | None):
    """The returned node has the new pod, and may still run the old one."""
    world = replaced()
    (worker,) = world.job.status.unfenced
    status = replace(world.job.status, unfenced=(replace(worker, attempt=attempt),))
    world.job = replace(world.job, status=status)
    del world.objects[PODS.plural, "train-1-abcde"]
    world.place(world.workers()[1].metadata.name, "node-1")
    world.node("node-1")
    world.settle()
    unfenced = [(w.attempt, w.index, w.node) for w in world.job.status.unfenced]
    assert unfenced == [(attempt, 1, "node-1")]
    assert started(world) == {""}


def test_the_annotation_of_the_job_opens_the_gate():
    world = replaced()
    world.spec(reliability=replace(world.job.spec.reliability, allow_unfenced_restart=True))
    world.settle()
    assert world.job.status.unfenced == ()
    assert started(world) == {"1"}


def test_the_annotation_of_the_queue_opens_the_gate():
    world = replaced()
    world.queue = make_queue(reliability={"allowUnfencedRestart": True})
    world.settle()
    assert started(world) == {"1"}


def test_the_taint_opens_the_gate():
    world = replaced()
    world.node("node-1", False, OUT_OF_SERVICE)
    world.settle()
    assert started(world) == {"1"}


def test_launchers_fence_with_a_shared_directory():
    world = replaced(zipped=True)
    assert started(world) == {"1"}
    orders = {pod.metadata.annotations.fence for pod in world.leaders()}
    began = format_time(world.now)
    assert orders == {f"{began} 0:1"}
    assert (world.phase, world.job.status.reason) == ("Queued", "Fencing")
    assert f"within 50 s of {began}" in world.job.status.message
    assert world.settle_twice().requeue_after == 50 - REPEAT_SECONDS
    world.pass_time(seconds=50)
    world.settle()
    assert world.phase == "Running"
    world.node("node-1")
    world.settle()
    assert world.job.status.unfenced == ()


def test_a_fence_annotation_of_others_is_ignored():
    world = replaced(zipped=True)
    for pod in world.workers():
        annotations = replace(pod.metadata.annotations, fence="soon 0:1")
        meta = replace(pod.metadata, annotations=annotations)
        world.objects[PODS.plural, pod.metadata.name] = replace(pod, metadata=meta)
    world.settle()
    assert world.phase == "Running"


def test_the_next_gang_waits_out_an_unfinished_fence():
    world = replaced(zipped=True)
    world.pass_time(seconds=10)
    world.end_container("train-r1-0-abcde", "trainer", exit_code=1, finished_at=world.now)
    world.settle()
    world.pass_time(minutes=10)
    world.settle()
    world.containers_stop()
    world.settle()
    assert world.job.status.attempt == 2
    assert {p.metadata.annotations.fence.partition(" ")[2] for p in world.leaders()} == {"0:1"}


def test_a_worker_without_a_watchdog_is_not_left_to_the_launchers():
    world = replaced(zipped=True)
    message = '{"exitCode": 125, "reason": "FenceUnproven", "message": "no proof of worker 1"}'
    world.end_container("train-r1-0-abcde", "trainer", exit_code=125, message=message)
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=10)
    world.settle()
    world.containers_stop()
    world.settle()
    status = world.job.status
    assert (status.attempt, status.restarts, status.disruptions) == (2, 0, 2)
    assert status.reason == "WaitingForFence"
    assert [w.unproven for w in status.unfenced] == [True]


def test_a_worker_that_never_started_blocks_nothing():
    world = replaced()
    lose(world, "node-3")
    assert [(w.attempt, w.node) for w in world.job.status.unfenced] == [(0, "node-1")]


@pytest.mark.parametrize("hours", [1, 24])
def test_launchers_cannot_fence_workers_of_an_earlier_job(hours):
    world = replaced(zipped=True)
    old = world.objects[PODS.plural, "train-1-abcde"]
    metadata = replace(
        old.metadata,
        creation_timestamp=world.now - timedelta(hours=hours),
        owner_references=(replace(old.metadata.owner_references[0], uid="uid-of-another"),),
    )
    world.objects[PODS.plural, "train-1-abcde"] = replace(old, metadata=metadata)
    meta = replace(world.job.metadata, creation_timestamp=world.now - timedelta(hours=1))
    cleared = replace(world.job.status, unfenced=())
    world.job = replace(world.job, metadata=meta, status=cleared)
    for pod in world.workers():
        bare = replace(pod.metadata, annotations=replace(pod.metadata.annotations, start=""))
        world.objects[PODS.plural, pod.metadata.name] = replace(pod, metadata=bare)
    world.settle()
    assert [w.attempt for w in world.job.status.unfenced] == [None]
    assert world.job.status.reason == "WaitingForFence"
    world.node("node-1")
    world.settle()
    assert world.job.status.reason == "WaitingForOldGang"


def test_a_suspension_does_not_wait_for_a_lost_node_but_a_resume_does():
    world = running()
    world.spec(suspend=True)
    world.node("node-1", False)
    world.settle()
    world.pass_time(seconds=40)
    world.containers_stop()
    world.settle()
    assert world.phase == "Suspended"
    world.vanish("train-1-abcde")
    world.resume()
    for pod in world.workers():
        world.place(pod.metadata.name, "node-2")
    world.settle()
    assert world.job.status.reason == "WaitingForFence"
    assert [w.index for w in world.job.status.unfenced] == [1]
    assert (JOBS.plural, "train-r1") in world.created
