"""A restart replaces the whole gang at once, never twice, and never beside running pods."""

from datetime import timedelta

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_api.kinds.status import MOST_GANGS
from torchrun_controller.reconcile.gang.fence import format_time
from torchrun_controller.reconcile.gang.gang import has_ended
from unit.reconcile.failing import disrupt, fail, running
from world import START


def test_the_first_failed_pod_is_a_new_gang_at_once():
    world = running()
    fail(world)
    plan = world.step()
    assert [apply.name for apply in plan.applies] == ["train-gang-uid-trai", "train-r1"]
    assert (world.phase, world.job.status.attempt, world.job.status.restarts) == ("Queued", 1, 1)
    survivor = [delete for delete in plan.deletes if delete.kind is PODS]
    assert [(d.name, d.grace_seconds) for d in survivor] == [("train-1-abcde", 5)]


def test_pods_of_a_restart_have_a_reason_of_their_own_until_they_run():
    world = running(nodes=1)
    fail(world)
    world.pass_backoff()
    world.step()
    created = world.job.status.message
    assert world.job.status.reason == "Restarting"
    world.settle()
    cause = created.partition(". ")[2]
    assert (world.phase, world.job.status.reason) == ("Queued", "Restarting")
    assert world.job.status.message == f"0 of 1 pod is running. Attempt 0 ended: {cause}"
    assert world.condition("Scheduled").reason == "WorkersWaiting"
    world.all_workers("Running")
    world.settle()
    assert world.job.status.reason == "WorkersRunning"


def test_pods_of_a_resumed_job_start_like_the_first():
    world = running(nodes=1)
    world.spec(suspend=True)
    world.settle()
    world.containers_stop()
    world.settle()
    world.spec(suspend=False)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Queued", "WorkersStarting")


def test_no_rank_starts_before_the_old_gang_has_ended():
    world = running()
    fail(world)
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Queued", "WaitingForOldGang")
    assert all(pod.metadata.annotations.start == "" for pod in world.workers())
    world.containers_stop()
    world.settle()
    assert all(pod.metadata.annotations.start == "1" for pod in world.leaders())
    assert world.phase == "Running"


def test_a_gang_without_pods_does_not_delay_the_next():
    world = running(nodes=1)
    fail(world)
    world.settle()
    assert world.workers()[0].metadata.annotations.start == "1"


def test_a_gang_of_an_earlier_job_of_this_name_holds_the_gate():
    world = running()
    for key, pod in list(world.objects.items()):
        if key[0] == PODS.plural:
            owners = (replace(pod.metadata.owner_references[0], uid="uid-of-another-time"),)
            meta = replace(
                pod.metadata,
                owner_references=owners,
                name=f"old-{key[1]}",
                creation_timestamp=world.now,
            )
            world.objects[PODS.plural, f"old-{key[1]}"] = replace(pod, metadata=meta)
            del world.objects[key]
    del world.objects[JOBS.plural, "train"]
    world.pass_time(hours=1)
    world.job = replace(
        world.job,
        metadata=replace(world.job.metadata, creation_timestamp=world.now),
        status=replace(world.job.status, workers=None, attempt=0),
    )
    world.settle()
    assert world.created[-1] == (JOBS.plural, "train")
    assert world.job.status.reason == "WaitingForOldGang"


def test_failures_are_counted_and_bounded():
    world = running(maxRestarts=2)
    for attempt in (1, 2):
        fail(world)
        world.settle()
        world.containers_stop()
        world.pass_time(minutes=5)
        world.settle()
        assert world.job.status.restarts == attempt
        world.all_workers("Running")
        world.settle()
    fail(world)
    world.settle()
    assert world.phase == "Failed"
    assert "All restarts are used (maxRestarts is 2)." in world.job.status.message
    assert world.job.status.restarts == 2


def test_a_failure_that_ends_the_job_by_a_rule_names_no_limit():
    world = running(maxRestarts=1, rules=[{"exitCodes": [7], "action": "fail"}])
    fail(world)
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=5)
    world.settle()
    assert world.job.status.restarts == 1
    world.all_workers("Running")
    world.settle()
    fail(world, exit_code=7)
    world.settle()
    assert world.phase == "Failed"
    assert "All restarts are used" not in world.job.status.message


def test_counts_stop_at_the_maximum_of_the_status():
    world = running()
    world.job = replace(world.job, status=replace(world.job.status, disruptions=MOST_GANGS))
    world.delete_child_job()
    world.settle()
    assert world.job.status.disruptions == MOST_GANGS
    assert world.job.status.attempts


def test_disruptions_restart_without_counting():
    world = running(maxRestarts=0)
    disrupt(world)
    world.settle()
    status = world.job.status
    assert (world.phase, status.restarts, status.disruptions) == ("Queued", 0, 1)
    assert status.attempts[0].reason == "EvictionByEvictionAPI"
    assert status.attempts[0].counted is False


def test_a_drained_pod_is_the_cause_and_not_its_peers():
    world = running(nodes=3, maxRestarts=0)
    fail(world, 1, exit_code=143)
    fail(world, 2, exit_code=143)
    disrupt(world, 0)
    world.settle()
    assert world.phase == "Queued"
    assert world.job.status.disruptions == 1


def test_a_deleted_pod_is_a_disruption_at_once():
    world = running(maxRestarts=0)
    name = world.workers()[0].metadata.name
    world._ending((PODS.plural, name), 30)
    world.settle()
    assert (world.phase, world.job.status.last_failure.reason) == ("Queued", "PodDeleted")
    assert world.job.status.disruptions == 1


def test_a_pod_that_broke_its_own_limits_counts():
    world = running(maxRestarts=0)
    fail(world, exit_code=137, reason="OOMKilled")
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "OOMKilled")


def test_the_first_cause_stays_while_the_next_gang_waits():
    world = running(maxRestarts=1)
    disrupt(world)
    world.settle()
    world.containers_stop()
    world.all_workers("Running")
    world.settle()
    disrupt(world)
    world.rest()
    assert (world.phase, world.job.status.reason) == ("Queued", "BackingOff")
    for pod in world.workers():
        if pod.status.phase == "Running":
            fail(world, [p.metadata.name for p in world.workers()].index(pod.metadata.name))
    world.settle()
    assert (world.job.status.restarts, world.job.status.disruptions) == (0, 2)


def test_only_the_last_attempts_and_their_jobs_are_kept():
    world = running(nodes=1, maxRestarts=20)
    for _ in range(12):
        world.pass_time(minutes=11)
        fail(world)
        world.settle()
        world.all_workers("Running")
        world.settle()
    assert [a.number for a in world.job.status.attempts] == list(range(2, 12))
    jobs = {name for plural, name in world.objects if plural == JOBS.plural}
    assert jobs == {"train-r8", "train-r9", "train-r10", "train-r11", "train-r12"}


def test_a_job_whose_pods_vanished_was_disrupted():
    world = running(maxRestarts=0)
    for key in [k for k in world.objects if k[0] == PODS.plural]:
        del world.objects[key]
    world.job_condition("Failed", "BackoffLimitExceeded", "too many")
    world.settle()
    assert (world.phase, world.job.status.disruptions) == ("Queued", 1)


def test_remaining_pods_of_a_failed_job_are_deleted():
    world = running(maxRestarts=0)
    fail(world)
    plan = world.step()
    assert world.phase == "Failed"
    assert [d.grace_seconds for d in plan.deletes] == [5]
    world.objects[PODS.plural, "train-1-abcde"] = replace(
        world.objects[PODS.plural, "train-1-abcde"],
        metadata=replace(
            world.objects[PODS.plural, "train-1-abcde"].metadata, deletion_timestamp=None
        ),
    )
    assert len(world.step().deletes) == 1, "even if the first attempt was lost"


def test_a_disruption_without_a_message():
    world = running(maxRestarts=0)
    pod = world.workers()[0]
    condition = Condition(type="DisruptionTarget", status="True", last_transition_time=START)
    world.pod(pod.metadata.name, phase="Failed", conditions=(condition,))
    world.settle()
    assert world.job.status.last_failure.reason == "DisruptionTarget"
    assert timedelta() == world.job.status.last_failure.time - START


def test_a_gang_starts_by_annotation_only():
    world = running()
    fail(world)
    world.settle()
    world.containers_stop()
    applies = world.plan().applies
    assert {apply.kind for apply in applies} == {PODS}
    for apply in applies:
        assert set(apply.body["metadata"]) == {"name", "namespace", "annotations"}
        annotations = {names.START: "1", names.NOTIFICATION_TIME: format_time(world.now)}
        assert apply.body["metadata"]["annotations"] == annotations


def test_a_gang_has_ended_once_every_pod_is_seen_to_have_ended():
    world = running()
    assert not has_ended(world.job, world.observed().gang)
    world.all_workers("Failed")
    assert has_ended(world.job, world.observed().gang), "its Job may report it later"
    world.vanish("train-1-abcde")
    assert not has_ended(world.job, world.observed().gang), "the cache of pods may lag behind"
