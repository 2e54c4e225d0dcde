"""How the failure policy, waits and elastic sizes treat lost pods."""

import pytest

from torchrun_api.kinds import JOBS, PODS
from torchrun_controller.reconcile.gang import replacement
from torchrun_controller.reconcile.model.observed import ObservedGang
from unit.reconcile.replacing import (
    counts,
    delete,
    evict,
    gangs,
    kill_by_memory,
    limit,
    reasons,
    replace_lost,
    run,
    running,
    stop,
    submitted,
)

# The failure policy


def test_a_disruption_is_replaced_without_any_restart_left():
    world = running(reliability={"maxRestarts": 0})
    evict(world, 1)
    world.settle()
    assert (world.phase, counts(world)) == ("Queued", (0, 0, 1))
    replace_lost(world)
    run(world)
    assert world.phase == "Running"


def test_a_memory_kill_without_any_restart_left_fails_the_job():
    world = running(reliability={"maxRestarts": 0})
    kill_by_memory(world, 1)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "OOMKilled")
    assert limit(world) == 0


@pytest.mark.parametrize(
    ("action", "phase", "expected"),
    [
        ("fail", "Failed", (0, 0, 0)),
        ("restart", "Queued", (0, 1, 0)),
        ("ignore", "Queued", (0, 0, 1)),
    ],
)
def test_rules_decide_on_lost_pods(action, phase, expected):
    rules = [{"podConditions": ["DisruptionTarget"], "action": action}]
    world = running(reliability={"rules": rules})
    evict(world, 1)
    world.settle()
    assert (world.phase, counts(world)) == (phase, expected)
    assert gangs(world) == 1


def test_a_rule_that_fails_the_job_holds_for_a_pod_that_was_replaced_already():
    rules = [{"podConditions": ["DisruptionTarget"], "action": "fail"}]
    world = running(reliability={"rules": rules})
    evict(world, 1)
    world.pass_time(seconds=10)
    world.replace_pods()
    world.settle()
    assert world.phase == "Failed"


# Waits


def test_a_pod_without_a_node_leads_to_a_new_gang_that_does_not_count():
    world = running()
    stop(world, 1)
    replace_lost(world)
    world.not_placed("0/2 nodes are available: 2 Insufficient cpu.", 1)
    plan = world.settle()
    assert world.job.status.reason == "Unschedulable"
    assert plan.requeue_after is not None
    assert plan.requeue_after <= 30
    world.pass_time(seconds=30)
    world.settle()
    assert counts(world) == (1, 0, 1)
    assert reasons(world) == [(0, "PodDeleted"), (0, "NotReplaced")]
    assert world.job.status.last_failure.reason == "PodDeleted"
    assert limit(world) == 0


def test_a_job_controller_that_creates_no_pod_is_not_waited_for():
    world = running()
    stop(world, 1)
    world.pass_time(seconds=240)
    world.settle()
    assert counts(world) == (1, 0, 1)


def test_the_status_says_why_the_job_controller_creates_no_pod():
    world = running()
    stop(world, 1)
    quota = "exceeded quota: small, requested: cpu=8, used: cpu=16, limited: cpu=16"
    world.warn(JOBS, "train", "FailedCreate", f'Error creating: pods "x" is forbidden: {quota}')
    world.settle()
    status = world.job.status
    assert (status.phase, status.reason) == ("Queued", "QuotaExceeded")
    assert "small" in status.message


def test_a_pod_that_does_not_run_is_not_waited_for():
    world = running()
    stop(world, 1)
    (new,) = replace_lost(world)
    world.place(new.metadata.name, "node-1")
    world.container_waits(new.metadata.name, "ErrImagePull", "no such image")
    world.settle()
    assert world.job.status.reason == "ImagePullFailed"
    world.pass_time(seconds=230)
    world.settle()
    assert counts(world) == (1, 0, 1)


def test_a_gang_awaits_lost_pods_and_new_ones_until_they_run():
    def awaited() -> list[str]:
        pods = replacement.find_awaited(world.job, world.observed().gang)
        return [pod.metadata.name for pod in pods]

    world = submitted()
    assert replacement.find_awaited(world.job, ObservedGang()) == ()
    run(world)
    lost = world.workers()[1].metadata.name
    assert awaited() == []
    delete(world, 1)
    assert awaited() == [lost], "it terminates"
    world.containers_stop()
    world.settle()
    assert awaited() == [lost], "it is not replaced yet"
    (new,) = replace_lost(world)
    assert awaited() == [new.metadata.name], "it does not run yet"
    run(world)
    assert awaited() == []


def test_a_gang_that_is_replaced_as_a_whole_awaits_no_pods():
    world = submitted(reliability={"podReplacement": "Gang"})
    run(world)
    world._ending((PODS.plural, world.workers()[1].metadata.name), 30)
    assert replacement.find_awaited(world.job, world.observed().gang) == ()


def test_the_launchers_wait_longer_than_the_controller():
    longest = replacement.END_WITHIN + replacement.REPLACE_WITHIN
    assert replacement.launcher_seconds(30) > 30 + longest.total_seconds()


# Elastic jobs


def test_an_elastic_gang_shrinks_if_the_new_pod_finds_no_node():
    world = running(elastic={"minNodes": 2, "maxNodes": 3})
    world.pass_time(hours=1)
    stop(world, 1)
    replace_lost(world)
    assert gangs(world) == 1, "the new pod has just been created"
    world.pass_time(seconds=29)
    world.settle()
    assert gangs(world) == 1
    world.pass_time(seconds=1)
    world.settle()
    assert (gangs(world), world.job.status.num_nodes) == (2, 2)
    assert counts(world) == (1, 0, 1)
    assert reasons(world) == [(0, "PodDeleted"), (0, "Shrinking")]


def test_an_elastic_gang_shrinks_to_the_pods_that_have_not_ended():
    world = running(nodes=4, elastic={"minNodes": 2, "maxNodes": 4})
    world.pass_time(hours=1)
    stop(world, 1)
    replace_lost(world)
    world.pass_time(seconds=25)
    evict(world, 2)
    world.settle()
    world.pass_time(seconds=5)
    world.settle()
    assert (gangs(world), world.job.status.num_nodes) == (2, 2)


@pytest.mark.parametrize(
    ("lose", "reason", "expected"),
    [(evict, "EvictionByEvictionAPI", (1, 0, 1)), (kill_by_memory, "OOMKilled", (1, 1, 1))],
)
def test_a_pod_that_is_lost_at_the_moment_of_a_shrink_is_recorded(lose, reason, expected):
    world = running(nodes=4, elastic={"minNodes": 2, "maxNodes": 4})
    stop(world, 1)
    replace_lost(world)
    world.pass_time(seconds=30)
    lose(world, 2)
    world.settle()
    assert (gangs(world), world.job.status.num_nodes) == (2, 2)
    assert reasons(world) == [(0, "PodDeleted"), (0, reason), (0, "Shrinking")]
    assert counts(world) == expected, "no round started between the two losses"
    assert world.job.status.last_failure is not None
    assert world.job.status.last_failure.reason == reason


def test_an_elastic_gang_that_cannot_shrink_is_replaced():
    world = running(elastic={"minNodes": 3, "maxNodes": 3})
    stop(world, 1)
    replace_lost(world)
    world.pass_time(seconds=30)
    world.settle()
    assert (gangs(world), world.job.status.num_nodes) == (2, 3)
    assert reasons(world)[-1] == (0, "NotReplaced")
