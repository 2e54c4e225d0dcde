"""Unfenced workers in the status, even if pods and nodes vanish between two reconciles."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.status import TorchrunJobStatus, UnfencedWorker
from torchrun_controller.reconcile.gang.fence import fence_annotation, has_worker
from torchrun_controller.reconcile.model.observed import RestartsInPlace
from torchrun_runtime.launch.podinfo import workers_in
from unit.reconcile.losing import OUT_OF_SERVICE, begin, lose, replaced, running, started
from world import START, World, make_job, make_queue

# Pods and Nodes that vanish between two reconciles


def take_away(world: World, *indexes: int) -> None:
    """Node objects and their pods vanish before the next reconcile."""
    assert world.nodes is not None
    for index in indexes:
        del world.nodes[f"node-{index}"]
        world.vanish(f"train-{index}-abcde")


@pytest.mark.parametrize("end", ["the Job fails", "the Job is deleted", "a pause", "a new leader"])
def test_an_unseen_loss_of_node_and_pod_blocks_the_next_gang(end: str):
    world = running()
    assert world.job.status.worker_nodes == ("node-0", "node-1")
    take_away(world, 1)
    if end == "the Job fails":
        world.job_condition("Failed", "BackoffLimitExceeded")
    elif end == "the Job is deleted":
        world.delete_child_job()
    elif end == "a pause":
        world.suspend()
        world.spec(suspend=False)
    else:
        world.pod("train-0-abcde", phase="Failed")
        world.step(writes=1)  # the process dies before it writes a status
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=2)
    world.settle()
    assert [(w.attempt, w.index, w.node) for w in world.job.status.unfenced] == [(0, 1, "node-1")]
    assert world.job.status.reason == "WaitingForFence"
    assert started(world) == {""}


def test_launchers_fence_an_unseen_loss():
    world = running(zipped=True)
    take_away(world, 1)
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    world.containers_stop()
    for pod in world.workers():
        world.place(pod.metadata.name, "node-2")
    world.all_workers("Running")
    world.settle()
    assert {p.metadata.annotations.fence.partition(" ")[2] for p in world.leaders()} == {"0:1"}


@pytest.mark.parametrize("node", ["node-1", "another"])
def test_a_pod_that_vanished_from_a_ready_node_has_stopped(node: str):
    world = running()
    world.remove("train-1-abcde")
    if node == "another":
        world.node("node-9", False)
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    assert world.job.status.unfenced == ()
    assert world.job.status.worker_nodes == ()


def test_a_worker_that_was_seen_to_stop_needs_no_fence():
    world = running()
    world.end_container("train-1-abcde", "trainer", exit_code=0)
    world.pod("train-1-abcde", phase="Succeeded")
    world.settle()
    assert world.job.status.worker_nodes == ("node-0",)
    take_away(world, 1)
    world.settle()
    assert world.job.status.unfenced == ()


def test_a_confirmed_unseen_loss_blocks_nothing():
    world = running()
    take_away(world, 1)
    world.node("node-1", False, OUT_OF_SERVICE)
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    assert world.job.status.unfenced == ()


def test_without_nodes_no_loss_is_recorded():
    world = running()
    world.nodes = None
    world.settle()
    assert world.job.status.worker_nodes == ()


def test_without_nodes_recorded_losses_stay():
    world = replaced()
    world.nodes = None
    world.settle()
    assert [worker.node for worker in world.job.status.unfenced] == ["node-1"]


def test_no_gang_is_created_before_unfenced_workers_are_recorded():
    world = running()
    world.node("node-1", False)
    world.pass_time(seconds=40)
    world.step(writes=9)
    assert len(world.gangs) == 1
    world.settle()
    assert len(world.gangs) == 2
    assert [w.index for w in world.job.status.unfenced] == [1]


# A machine without a Node object


def vouch(world: World, *machines: str) -> None:
    annotations = {**world.job.metadata.annotations, names.MACHINES_OFF: ", ".join(machines)}
    meta = replace(world.job.metadata, annotations=annotations)
    world.job = replace(world.job, metadata=meta)


def without_node() -> World:
    """The last step of the runbook, too early: the Node to taint is already deleted."""
    world = replaced()
    take_away(world, 1)
    world.settle()
    return world


def test_a_machine_without_a_node_can_be_confirmed():
    world = without_node()
    assert world.job.status.reason == "WaitingForFence"
    assert (
        "you confirm that it is off (if the Node object is gone: kubectl annotate"
        " torchrunjob train -n ml --overwrite torchrun.ai/machines-off=0/node-1)"
    ) in world.job.status.message
    assert "kubectl taint" not in world.job.status.message
    vouch(world, "0/node-1")
    world.settle()
    assert world.job.status.unfenced == ()
    assert started(world) == {"1"}


@pytest.mark.parametrize(
    "annotation", ["", "0/node-9", "1/node-1", "node-1", "/node-1", "*", "0/", ","]
)
def test_other_annotations_confirm_nothing(annotation: str):
    world = without_node()
    vouch(world, annotation)
    world.pass_time(days=1)
    world.settle()
    assert started(world) == {""}


def test_a_machine_with_a_node_is_confirmed_by_a_taint():
    world = replaced()
    vouch(world, "0/node-1")
    world.settle()
    assert started(world) == {""}
    assert "kubectl taint nodes node-1" in world.job.status.message


def test_an_old_confirmation_does_not_apply_to_a_later_loss():
    world = without_node()
    vouch(world, "0/node-1")
    world.settle()
    world.node("node-1")
    for index, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"node-{index}")
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    assert world.nodes is not None
    del world.nodes["node-1"]
    world.vanish("train-r1-1-abcde")
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=10)
    world.settle()
    assert [(w.attempt, w.node) for w in world.job.status.unfenced] == [(1, "node-1")]
    assert "torchrun.ai/machines-off=1/node-1)" in world.job.status.message


def test_messages_separate_machines_with_and_without_a_node():
    world = running(nodes=4)
    take_away(world, 1)
    for node in ("node-2", "node-3"):
        world.node(node, False)
    world.pass_time(seconds=40)
    world.settle()
    world.containers_stop()
    world.settle()
    message = world.job.status.message
    assert "kubectl taint nodes node-2" in message
    assert "torchrun.ai/machines-off=0/node-1)" in message


def test_only_the_first_machines_are_in_the_message():
    world = World(make_job(numNodes=8), make_queue())
    for index in range(8):
        world.node(f"node-{index}")
    world.settle()
    begin(world)
    take_away(world, *range(1, 8))
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    world.containers_stop()
    world.settle()
    assert "=0/node-1,0/node-2,0/node-3,0/node-4 and 3 more)" in world.job.status.message


# Bounds


def unfenced_workers(indexes: Iterable[int]) -> tuple[UnfencedWorker, ...]:
    return tuple(
        UnfencedWorker(attempt=1, index=i, node=f"{i:063}", since=START, unproven=True)
        for i in indexes
    )


MOST = 10_000  # nodes of one job


@pytest.mark.parametrize(
    ("indexes", "longest"), [(range(MOST), 64), (range(0, MOST, 2), 32 * 1024), ([7], 64)]
)
def test_the_fence_annotation_is_bounded(indexes: Iterable[int], longest: int):
    workers = unfenced_workers(indexes)
    order = fence_annotation(workers, START)
    assert len(order) <= longest
    assert [(w.attempt, w.completion_index) for w in workers_in(order)] == [
        (1, index) for index in indexes
    ]


@settings(deadline=None)
@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 40))))
def test_the_launcher_reads_the_fence_annotation(workers: set[tuple[int, int]]):
    unfenced = tuple(UnfencedWorker(attempt=attempt, index=index) for attempt, index in workers)
    assert workers_in(fence_annotation(unfenced, START)) == sorted(workers)


def test_unfenced_workers_of_a_lost_cluster_fit_into_etcd():
    """etcd accepts requests of 1.5 MiB. Each worker is in one of the two lists."""
    lost = TorchrunJobStatus(unfenced=unfenced_workers(range(MOST)))
    works = TorchrunJobStatus(worker_nodes=tuple(f"{index:063}" for index in range(MOST)))
    assert len(msgspec.json.encode(lost)) < 1.45 * 1024 * 1024
    assert len(msgspec.json.encode(works)) < len(msgspec.json.encode(lost))
    world = replaced()
    assert world.job.status.worker_nodes == ()


# Workers that the launchers have fenced


def report(world: World) -> None:
    """The launcher of node 0 reports that the ranks of the present gang have started."""
    child = world.observed().gang.current_job.metadata.uid
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace())


def unfenced_of(world: World) -> list[tuple[int | None, int, str]]:
    return [(w.attempt, w.index, w.node) for w in world.job.status.unfenced]


def lose_machine(world: World, index: int) -> None:
    """The machine of a worker is gone, with its Node and its pod. The next gang runs elsewhere."""
    world.pass_time(minutes=10)  # without back-off
    attempt = world.job.status.attempt
    name = world.workers()[index].spec.node_name
    lose(world, name)
    assert world.nodes is not None
    del world.nodes[name]
    world.remove(*(p.metadata.name for p in world.observed().gang.stale_pods))
    world.containers_stop()
    for number, pod in enumerate(world.workers()):
        node = f"node-{attempt + 1}{number}"
        world.node(node)
        world.place(pod.metadata.name, node)
    world.all_workers("Running")
    world.settle_twice()
    world.pass_time(seconds=50)
    world.settle()


def test_machines_that_were_fenced_are_forgotten_once_the_ranks_of_the_next_gang_run():
    world = running(zipped=True)
    for attempt in range(1, 5):
        lose_machine(world, 1)
        assert (world.phase, world.job.status.attempt) == ("Running", attempt)
        assert [(a, i) for a, i, _ in unfenced_of(world)] == [(attempt - 1, 1)]
        report(world)
        world.settle()
        assert unfenced_of(world) == []
        assert world.phase == "Running"


def test_without_a_report_a_fenced_machine_stays():
    """A launcher may still wait at its gate although its pod runs."""
    world = running(zipped=True)
    lose_machine(world, 1)
    lose_machine(world, 1)
    assert [(a, i) for a, i, _ in unfenced_of(world)] == [(0, 1), (1, 1)]
    orders = [pod.metadata.annotations.fence for pod in world.leaders()]
    assert [order.partition(" ")[2] for order in orders] == ["0:1 1:1"]
    report(world)
    world.settle()
    assert unfenced_of(world) == []


def test_a_report_of_an_earlier_gang_proves_nothing():
    world = running(zipped=True)
    report(world)
    lose_machine(world, 1)
    assert [(a, i) for a, i, _ in unfenced_of(world)] == [(0, 1)]


def test_a_machine_that_the_gang_did_not_fence_stays():
    world = running(zipped=True)
    lose_machine(world, 1)
    others = (
        UnfencedWorker(attempt=0, index=0, node="other"),
        UnfencedWorker(attempt=None, index=1, node="other"),
    )
    status = world.job.status
    world.job = replace(world.job, status=replace(status, unfenced=(*status.unfenced, *others)))
    report(world)
    world.settle()
    assert unfenced_of(world) == [(0, 0, "other"), (None, 1, "other")]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=20),
    st.tuples(st.integers(0, 3), st.integers(0, 30)),
)
@settings(deadline=None)
def test_an_order_has_exactly_its_workers(ordered, asked):
    order = fence_annotation(
        tuple(UnfencedWorker(attempt=a, index=i, node="n") for a, i in ordered), START
    )
    worker = UnfencedWorker(attempt=asked[0], index=asked[1], node="n")
    assert has_worker(order, worker) is (asked in ordered)


@pytest.mark.parametrize("order", ["", "2026-01-02T03:04:05Z", "x 0:a", "x 0:1-", "x 0:", "x 0"])
def test_an_order_of_others_has_no_worker(order):
    assert not has_worker(order, UnfencedWorker(attempt=0, index=2, node="n"))
