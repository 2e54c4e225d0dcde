"""A lost pod is replaced alone: it is recorded and counted once, and then its gate opens."""

import json

import pytest
from msgspec.structs import replace

from torchrun_api.core import ContainerState, ContainerStatus, Pod, StateTerminated
from torchrun_api.kinds import PODS
from unit.reconcile.replacing import (
    counts,
    delete,
    evict,
    gangs,
    kill_by_memory,
    limit,
    place,
    reasons,
    replace_lost,
    run,
    running,
    start,
    stop,
    submitted,
)


def test_a_deleted_pod_is_replaced_and_the_others_keep_theirs():
    world = running()
    before = {pod.metadata.uid for pod in world.workers()}
    delete(world, 1)
    assert (world.phase, world.job.status.reason) == ("Queued", "ReplacingPods")
    assert world.job.status.attempts == (), "its end is not proven yet"
    lost = world.workers()[1].metadata
    world.containers_stop()
    world.settle()
    (end,) = world.job.status.attempts
    assert end.lost_pod is not None
    assert (end.lost_pod.uid, end.lost_pod.index, end.lost_pod.replaced) == (lost.uid, 1, 0)
    assert (end.number, end.reason, end.counted) == (0, "PodDeleted", False)
    assert [event.reason for plan in world.plans for event in plan.events].count("PodLost") == 1
    replace_lost(world)
    assert start(world, 1) == "", "it has no node yet"
    place(world, 1)
    assert start(world, 1) == "0/1", "the status has the end of the pod before it, and its node"
    run(world)
    assert (world.phase, counts(world)) == ("Running", (0, 0, 1))
    assert len(before & {pod.metadata.uid for pod in world.workers()}) == 2
    assert gangs(world) == 1
    assert limit(world) > 0


def test_the_template_opens_no_gate():
    world = submitted()
    assert not any(pod.metadata.annotations.start for pod in world.workers()[1:])
    template = world.templates[world.observed().gang.current_job.metadata.uid]
    assert "torchrun.ai/start" not in template["metadata"]["annotations"]
    assert start(world, 0) == "0"


@pytest.mark.parametrize("index", [0, 2])
def test_no_gate_opens_before_the_status_has_the_end(index):
    world = running()
    world.pass_time(seconds=60)
    evict(world, index)
    plan = world.step(writes=99)  # the process dies before it writes the status
    assert plan.status is not None
    world.pass_time(seconds=10)
    (name,) = world.replace_pods()
    world.place(name, f"node-{index}")
    plan = world.plan()
    assert not any(a.uid == world.workers()[index].metadata.uid for a in plan.applies)
    world.settle()
    assert start(world, index) == "0/1"
    assert counts(world) == (0, 0, 1)


def test_a_controller_that_starts_again_opens_the_gate_by_the_status():
    world = running()
    stop(world, 1)
    world.pass_time(seconds=10)
    lost = world.workers()[1].metadata.uid
    world.replace_pods()
    assert not any(pod.metadata.uid == lost for pod in world.observed().gang.replaced_pods)
    world.settle()  # only the status has the proof now
    place(world, 1)
    assert start(world, 1) == "0/1"
    assert counts(world) == (0, 0, 1)


def test_a_pod_whose_end_nobody_observed_ends_the_gang():
    world = running()
    lost = world.workers()[1].metadata.name
    world._ending((PODS.plural, lost), 30)
    world.containers_stop()
    world.pass_time(seconds=10)
    world.replace_pods()
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert reasons(world) == [(0, "PodDeleted")]
    assert "was not observed" in world.job.status.attempts[0].message
    assert limit(world, "train") == 0, "its Job creates no more pods"
    assert gangs(world) == 2


def test_a_pod_without_its_end_in_the_status_is_recorded_later():
    """The controller sees a lost pod and its replacement at the same time."""
    world = running()
    world.pass_time(seconds=60)
    evict(world, 1)
    world.pass_time(seconds=10)
    (name,) = world.replace_pods()
    assert [pod.metadata.name for pod in world.observed().gang.replaced_pods]
    assert world.observed().gang.stale_pods == (), "it has stopped"
    world.place(name, "node-1")
    world.step()
    assert world.objects[PODS.plural, name].metadata.annotations.start == ""
    world.settle()
    assert start(world, 1) == "0/1"
    assert counts(world) == (0, 0, 1)


def test_the_message_of_a_replaced_pod_has_restarts_that_no_report_brought():
    world = running()
    world.pass_time(seconds=60)
    message = json.dumps({"reason": "Terminated", "restartsInPlace": 2})
    end = StateTerminated(exit_code=143, finished_at=world.now, message=message)
    state = ContainerState(terminated=end)
    evict(world, 1, container_statuses=(ContainerStatus(name="trainer", state=state),))
    world.pass_time(seconds=10)
    world.replace_pods()
    world.settle()
    assert world.job.status.restarts_in_place == 2
    assert counts(world) == (0, 2, 1)


def test_only_the_pod_before_a_new_one_matters():
    world = running()
    for _ in range(2):
        world.pass_time(seconds=60)
        evict(world, 1)
        world.settle()
        replace_lost(world, 20)
        run(world)
    world.pass_time(seconds=60)
    evict(world, 1)
    world.pass_time(seconds=40)
    world.replace_pods()
    assert len(world.observed().gang.replaced_pods) == 3
    world.settle()
    place(world, 1)
    assert start(world, 1) == "0/3"
    assert counts(world) == (0, 0, 3)


def test_pods_that_are_lost_together_count_once():
    world = running(nodes=4)
    delete(world, 1)
    stop(world, 2)
    assert len(world.job.status.attempts) == 2
    assert counts(world) == (0, 0, 1)
    replace_lost(world)
    place(world, 1, 2)
    assert [start(world, index) for index in (1, 2)] == ["0/1", "0/1"]
    run(world)
    assert (world.phase, gangs(world)) == ("Running", 1)
    stop(world, 2)
    assert counts(world) == (0, 0, 2), "a new loss after they have joined"


def test_a_memory_kill_beside_a_drain_counts_as_a_restart():
    world = running(nodes=4, reliability={"maxRestarts": 1})
    stop(world, 1)
    kill_by_memory(world, 2)
    world.settle()
    kill_by_memory(world, 3)
    world.settle()
    assert counts(world) == (0, 1, 1)
    assert [end.counted for end in world.job.status.attempts] == [False, True, False]
    replace_lost(world)
    run(world)
    kill_by_memory(world, 3)
    world.settle()
    assert (world.phase, world.job.status.restarts) == ("Failed", 1)


@pytest.mark.parametrize(("nodes", "first"), [(2, (0,)), (8, (0, 1, 2, 3, 4))])
def test_a_gang_that_loses_too_many_pods_counts_once_with_those_before(nodes, first):
    world = running(nodes=nodes, reliability={"maxRestarts": 1})
    for index in first:
        kill_by_memory(world, index)
    world.settle()
    assert counts(world) == (0, 1, 0)
    kill_by_memory(world, len(first))
    world.settle()
    world.pass_time(seconds=20)
    world.settle()
    assert (gangs(world), counts(world)) == (2, (1, 1, 0))
    assert [end.counted for end in world.job.status.attempts].count(True) == 1


def test_a_memory_kill_that_ends_a_gang_counts_beside_a_drain():
    world = running(nodes=2)
    stop(world, 1)
    kill_by_memory(world, 0)
    world.rest()
    assert counts(world) == (0, 1, 1)


def test_too_many_lost_pods_are_a_lost_gang():
    world = running(nodes=8)
    delete(world, *range(6))
    assert counts(world) == (1, 0, 1)
    assert limit(world) == 0


def test_a_gang_without_any_other_pod_has_nothing_to_keep():
    world = running(nodes=2)
    delete(world, 0, 1)
    assert counts(world) == (1, 0, 1)
    assert gangs(world) == 2


def test_a_new_pod_that_is_lost_before_it_joins_is_replaced():
    world = running()
    stop(world, 1)
    replace_lost(world)
    place(world, 1)
    stop(world, 1)
    replace_lost(world, 20)
    place(world, 1)
    assert start(world, 1) == "0/2"
    run(world)
    assert (world.phase, counts(world)) == ("Running", (0, 0, 2))


def test_a_new_pod_that_never_had_a_node_is_replaced():
    world = running()
    stop(world, 1)
    (first,) = replace_lost(world)
    world._ending((PODS.plural, first.metadata.name), 30)
    pod: Pod = world.objects[PODS.plural, first.metadata.name]
    status = replace(pod.status, phase="Failed")
    world.objects[PODS.plural, first.metadata.name] = replace(pod, status=status)
    world.settle()
    assert counts(world) == (0, 0, 1), "no round started between the two losses"
    assert len(world.job.status.attempts) == 2
    assert gangs(world) == 1


def test_an_index_that_is_lost_too_often_leads_to_a_new_gang():
    world = running()
    for loss in range(3):
        stop(world, 1)
        replace_lost(world, 10 * 2**loss)
        run(world)
    assert counts(world) == (0, 0, 3)
    stop(world, 1)
    assert (world.job.status.reason, counts(world)) == ("BackingOff", (0, 0, 4))
    assert reasons(world)[-1] == (0, "PodDeleted")
    assert world.job.status.attempts[-1].lost_pod is None, "the end of the gang"
    assert limit(world) == 0


def test_the_end_of_a_pod_of_an_earlier_gang_proves_nothing():
    world = running()
    stop(world, 1)
    replace_lost(world)
    run(world)
    world.pass_time(seconds=600)
    end = {"exit_code": 1, "finished_at": world.now}
    world.end_container(world.workers()[2].metadata.name, "trainer", **end)
    world.settle()
    world.containers_stop()
    run(world)
    assert (world.phase, counts(world)) == ("Running", (1, 1, 1))
    lost = world.workers()[1].metadata.name
    world._ending((PODS.plural, lost), 30)
    world.containers_stop()
    world.pass_time(seconds=10)
    (name,) = world.replace_pods()
    world.place(name, "node-1")
    world.step()
    assert not any("/" in pod.metadata.annotations.start for pod in world.workers())
    assert world.job.status.attempts[-1].number == 1
    assert world.job.status.attempts[-1].lost_pod is None


def test_an_index_that_no_status_can_have_leads_to_a_new_gang():
    world = running()
    pod = world.workers()[2]
    labels = replace(pod.metadata.labels, completion_index="99999")
    pod = replace(pod, metadata=replace(pod.metadata, labels=labels))
    world.objects[PODS.plural, pod.metadata.name] = pod
    evict(world, 2)
    world.settle()
    assert counts(world) == (1, 0, 1)


def test_the_status_keeps_an_end_that_a_gate_needs():
    world = running(nodes=4)
    stop(world, 1)
    ends = [replace(world.job.status.attempts[0], number=0, round=None)]
    later = [
        replace(
            ends[0],
            lost_pod=replace(ends[0].lost_pod, uid=f"later-{n}", index=3, replaced=n),
            end_time=world.now,
        )
        for n in range(10)
    ]
    first = ends[0].lost_pod.uid
    world.pass_time(seconds=5)
    world.job = replace(world.job, status=replace(world.job.status, attempts=(*ends, *later[:9])))
    stop(world, 2)
    uids = [end.lost_pod.uid for end in world.job.status.attempts if end.lost_pod]
    assert len(uids) == 10
    assert first in uids
    replace_lost(world)
    place(world, 1, 2)
    assert [start(world, index) for index in (1, 2)] == ["0/1", "0/1"]


# Restarts in place, node 0


def test_a_restart_in_place_and_a_loss_at_once_count_once_each():
    world = running()
    world.restart_in_place(node=2)
    stop(world, 1)
    assert counts(world) == (0, 1, 1)
    assert world.job.status.restarts_in_place == 1
    assert [end.round for end in world.job.status.attempts] == [0, None]
    world.restart_in_place(node=2, round=2)
    world.settle()
    assert counts(world) == (0, 2, 1)


def test_a_new_pod_of_node_0_continues_the_rounds():
    world = running()
    world.restart_in_place(node=1)
    world.settle()
    stop(world, 0)
    replace_lost(world)
    place(world, 0)
    leader = world.workers()[0].metadata.annotations
    assert (leader.start, leader.restarts_in_place) == ("0/1", "1 1")
    run(world)
    assert world.phase == "Running"
    assert counts(world) == (0, 1, 1)


def test_the_fence_remembers_the_ranks_while_node_0_is_replaced():
    world = running()
    stop(world, 0)
    world.pass_time(seconds=10)
    world.replace_pods()
    world.node("node-2", False)
    world.step()  # the gate of the new pod of node 0 is still closed
    assert [worker.index for worker in world.job.status.unfenced] == [2]
