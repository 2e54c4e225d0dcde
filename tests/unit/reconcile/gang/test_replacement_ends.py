"""Why a gang that replaces lost pods ends, and another one follows."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds import JOBS
from torchrun_api.meta import Condition
from unit.reconcile.replacing import (
    counts,
    delete,
    evict,
    gangs,
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
from world import make_queue

# Why a gang does not go on


def test_a_lost_node_leads_to_a_new_gang():
    world = running()
    world.node("node-1", False)
    world.settle()
    world.pass_time(seconds=40)
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert reasons(world) == [(0, "NodeLost")]
    assert limit(world) == 0


def test_a_pod_on_a_node_that_is_lost_while_it_terminates_ends_the_gang():
    world = running()
    delete(world, 1)
    world.node("node-1", False)
    world.settle()
    world.pass_time(seconds=40)
    world.settle()
    assert counts(world) == (1, 0, 1)


def test_a_pod_that_the_garbage_collector_failed_ends_the_gang():
    world = running()
    world.nodes = {name: node for name, node in (world.nodes or {}).items() if name != "node-1"}
    gone = Condition(type="DisruptionTarget", status="True", reason="DeletionByPodGC")
    world.pod(world.workers()[1].metadata.name, phase="Failed", conditions=(gone,))
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert [worker.node for worker in world.job.status.unfenced] == ["node-1"]
    world.job = replace(world.job)  # its Job has replaced the pod meanwhile
    assert not any(pod.metadata.annotations.start for pod in world.workers())


def test_a_worker_whose_pod_was_replaced_unseen_is_fenced():
    """Its node and its pod are gone, and the Job controller has created a new one."""
    world = running()
    lost = world.workers()[1].metadata.name
    world.nodes = {name: node for name, node in (world.nodes or {}).items() if name != "node-1"}
    world.pod(lost, phase="Failed", conditions=())
    assert world.replace_pods()
    world.vanish(lost)
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert [(w.index, w.node) for w in world.job.status.unfenced] == [(1, "node-1")]


def test_a_replaced_pod_that_may_still_run_blocks_the_next_gang():
    world = running()
    world.nodes = {name: node for name, node in (world.nodes or {}).items() if name != "node-1"}
    gone = Condition(type="DisruptionTarget", status="True", reason="DeletionByPodGC")
    world.pod(world.workers()[1].metadata.name, phase="Failed", conditions=(gone,))
    world.pass_time(seconds=10)
    world.replace_pods()
    assert len(world.observed().gang.stale_pods) == 1
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert [(w.index, w.node) for w in world.job.status.unfenced] == [(1, "node-1")]


def test_a_launcher_that_the_fence_has_ended_leads_to_a_new_gang():
    world = running()
    name = world.workers()[1].metadata.name
    message = '{"exitCode": 125, "reason": "Fenced", "message": "The storage is gone."}'
    end = {"exit_code": 125, "message": message, "finished_at": world.now}
    world.end_container(name, "trainer", **end)
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert reasons(world) == [(0, "Fenced")]


def test_a_failure_of_the_command_leads_to_a_new_gang():
    world = running(reliability={"maxRestarts": 1})
    stop(world, 1)
    name = world.workers()[2].metadata.name
    message = '{"exitCode": 1, "reason": "Exception", "message": "KeyError: 1"}'
    end = {"exit_code": 1, "message": message, "finished_at": world.now}
    world.end_container(name, "trainer", **end)
    world.rest()
    assert (world.job.status.reason, counts(world)) == ("BackingOff", (0, 1, 1))
    assert reasons(world) == [(0, "PodDeleted"), (0, "Exception")]
    assert limit(world) == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_pods_that_did_not_wait_for_the_new_pod_have_no_failure_of_their_own(recorded):
    """As with launchers of an image that does not know the replacement of pods."""
    world = running()
    delete(world, 1)
    if recorded:
        world.containers_stop()
        world.settle()
    message = '{"exitCode": 1, "reason": "PeerFailed", "message": "The gang has ended."}'
    for index in (0, 2):
        name = world.workers()[index].metadata.name
        end = {"exit_code": 1, "message": message, "finished_at": world.now}
        world.end_container(name, "trainer", **end)
    world.settle()
    world.pass_time(seconds=10)
    world.settle()
    assert counts(world) == (1, 0, 1), "the loss is the cause, and it counts once"
    assert world.job.status.last_failure is not None
    assert world.job.status.last_failure.reason == "PodDeleted"


def test_a_pod_that_has_succeeded_cannot_start_again():
    world = running()
    stop(world, 1)
    world.pod(world.workers()[2].metadata.name, phase="Succeeded")
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert reasons(world) == [(0, "PodDeleted"), (0, "NotReplaced")]


def test_a_pod_that_does_not_end_leads_to_a_new_gang():
    world = running()
    delete(world, 1)
    plan = world.plan()
    assert plan.requeue_after == 90
    world.pass_time(seconds=89)
    world.settle()
    assert gangs(world) == 1
    world.pass_time(seconds=1)
    world.settle()
    assert counts(world) == (1, 0, 1)


def test_without_nodes_the_gang_ends():
    world = running()
    world.nodes = None
    stop(world, 1)
    assert counts(world) == (1, 0, 1)


def test_a_job_of_an_older_controller_keeps_its_behavior():
    world = submitted(reliability={"podReplacement": "Gang"})
    run(world)
    world.spec(reliability=replace(world.job.spec.reliability, pod_replacement="Pod"))
    stop(world, 1)
    assert counts(world) == (1, 0, 1)
    assert limit(world, "train-r1") > 0, "the next gang replaces pods"


def test_a_job_whose_limit_a_user_sets_replaces_none():
    world = running()
    child = world.objects[JOBS.plural, "train"]
    spec = replace(child.spec, backoff_limit=0)
    world.objects[JOBS.plural, "train"] = replace(child, spec=spec)
    stop(world, 1)
    assert counts(world) == (1, 0, 1)


# Why the next gang was created


@pytest.mark.parametrize("writes", [None, 1], ids=["", "the controller dies before the status"])
def test_the_next_gang_says_which_pod_was_not_replaced(writes):
    world = running()
    stop(world, 1)
    replace_lost(world)
    world.pass_time(seconds=30)
    world.step(writes)
    world.vanish(*(pod.metadata.name for pod in world.observed().gang.stale_pods))
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert reasons(world) == [(0, "PodDeleted"), (0, "NotReplaced")]
    assert world.job.status.reason == "Restarting"
    assert "found no node within 30 s" in world.job.status.message


def test_a_gang_whose_job_is_gone_says_which_pod_was_not_replaced():
    world = running()
    stop(world, 1)
    replace_lost(world)
    world.queue = None
    world.pass_time(seconds=30)
    world.settle()
    assert reasons(world)[-1] == (0, "NotReplaced")
    world.delete_child_job()
    world.vanish(*(pod.metadata.name for pod in world.observed().gang.stale_pods))
    world.queue = make_queue()
    plan = world.plan()
    assert plan.status is not None
    assert plan.status.reason == "Restarting"
    assert "found no node within 30 s" in plan.status.message


# Other reasons for the end of a gang


def test_a_suspension_ends_a_gang_that_waits_for_a_pod():
    world = running()
    delete(world, 1)
    world.suspend()
    world.settle()
    assert (world.phase, counts(world)) == ("Suspended", (0, 0, 0))
    assert reasons(world) == [(0, "Suspended")]
    world.resume()
    assert (gangs(world), world.job.status.attempt) == (2, 1)


def test_the_deadline_ends_a_gang_that_loses_a_pod():
    world = running(reliability={"activeDeadlineSeconds": 100})
    world.pass_time(seconds=100)
    evict(world, 1)
    world.settle()
    assert world.phase == "TimedOut"
    assert limit(world) == 0
    assert world.job.status.disruptions == 0


def test_waiting_for_a_pod_is_no_running_time():
    world = running(reliability={"activeDeadlineSeconds": 100})
    world.pass_time(seconds=40)
    stop(world, 1)
    replace_lost(world, 100)
    run(world)
    assert world.phase == "Running"
    assert world.job.status.running_seconds == 44
    world.pass_time(seconds=50)
    assert world.settle().requeue_after == 2


def test_a_deleted_child_job_is_a_new_gang():
    world = running()
    stop(world, 1)
    world.delete_child_job()
    world.rest()
    assert counts(world) == (0, 0, 2), "the pod, and then the gang"
    world.pass_time(seconds=10)
    world.settle()
    assert (counts(world), gangs(world)) == ((1, 0, 2), 2)


def test_a_preemption_ends_a_gang_that_waits_for_a_pod():
    world = running()
    world.admit(3)
    stop(world, 1)
    assert counts(world) == (0, 0, 1)
    world.preempt()
    world.settle()
    assert world.phase == "Preempted"
    assert reasons(world) == [(0, "PodDeleted"), (0, "Preempted")]
    world.pass_time(seconds=10)
    assert world.replace_pods() == [], "its Job is gone"


def test_a_finished_job_replaces_no_more_pods():
    world = running()
    stop(world, 1)
    replace_lost(world)
    run(world)
    world.job_condition("Complete")
    for pod in world.workers():
        world.pod(pod.metadata.name, phase="Succeeded")
    world.settle()
    assert (world.phase, counts(world)) == ("Succeeded", (0, 0, 1))
    assert limit(world) > 0, "a Job that is complete needs no change"


def test_a_queue_and_parents_that_are_gone_do_not_matter():
    world = running(dependsOn=[{"name": "data", "condition": "Succeeded"}], parents=True)
    stop(world, 1)
    world.queue, world.neighbours = None, []
    replace_lost(world)
    place(world, 1)
    assert start(world, 1) == "0/1"
    run(world)
    assert (world.phase, counts(world)) == ("Running", (0, 0, 1))


def test_an_edit_of_resources_does_not_end_a_gang_that_waits_for_a_pod():
    world = running()
    world.admit(3)
    stop(world, 1)
    world.queue = make_queue(nodeResources={"cpus": 8}, limits={"maxNodesPerJob": 2})
    replace_lost(world)
    run(world)
    assert (world.phase, gangs(world)) == ("Running", 1)
