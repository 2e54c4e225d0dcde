"""Gang restarts: at once, as a gang, never twice, never beside what may still run."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds import JOBS, PODS
from torchrun_api.meta import Condition
from torchrun_api.status import MOST_GANGS
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.reliability import unreachable
from torchrun_controller.reconcile.spec.resolve import resolve_spec
from world import START, World, make_job, make_queue


def running(nodes: int = 2, **reliability: object) -> World:
    world = World(make_job(numNodes=nodes, reliability=reliability), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def fail(world: World, index: int = 0, **ended: object) -> None:
    name = world.workers()[index].metadata.name
    world.end_container(name, "trainer", **{"exit_code": 1, "finished_at": world.now, **ended})


def disrupt(world: World, index: int = 0, reason: str = "EvictionByEvictionAPI") -> None:
    pod = world.workers()[index]
    condition = Condition(type="DisruptionTarget", status="True", reason=reason, message="drained")
    world.pod(pod.metadata.name, phase="Failed", conditions=(condition,))


def test_the_first_failed_pod_is_a_new_gang_at_once():
    world = running()
    fail(world)
    plan = world.step()
    assert [apply.name for apply in plan.applies] == ["train-r1"]
    assert (world.phase, world.job.status.attempt, world.job.status.restarts) == ("Queued", 1, 1)
    survivor = [delete for delete in plan.deletes if delete.kind is PODS]
    assert [(d.name, d.grace_seconds) for d in survivor] == [("train-1-abcde", 5)]


def test_no_rank_of_the_new_gang_starts_beside_one_of_the_old():
    world = running()
    fail(world)
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Queued", "WaitingForOldGang")
    assert all(pod.metadata.annotations.start == "" for pod in world.workers())
    world.containers_stop()
    world.settle()
    assert all(pod.metadata.annotations.start == "1" for pod in world.workers())
    assert world.phase == "Running"


def test_a_gang_that_is_all_gone_lets_the_next_start_without_a_word():
    world = running(nodes=1)
    fail(world)
    world.settle()
    assert world.workers()[0].metadata.annotations.start == "1"


def test_an_earlier_jobs_gang_of_the_same_name_holds_the_gate_too():
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
    assert "all 2 restarts are used up" in world.job.status.message
    assert world.job.status.restarts == 2


def test_counts_stop_at_what_the_status_may_show():
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


def test_a_drained_pod_is_the_cause_and_not_its_peers_who_end_by_sigterm():
    world = running(nodes=3, maxRestarts=0)
    fail(world, 1, exit_code=143)
    fail(world, 2, exit_code=143)
    disrupt(world, 0)
    world.settle()
    assert world.phase == "Queued"
    assert world.job.status.disruptions == 1


def test_a_deleted_pod_is_a_disruption_as_soon_as_it_is_told_to_end():
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


def test_the_first_judgement_stands_while_the_next_gang_waits():
    world = running(maxRestarts=1)
    disrupt(world)
    world.settle()
    world.containers_stop()
    world.all_workers("Running")
    world.settle()
    disrupt(world)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Queued", "BackingOff")
    for pod in world.workers():
        if pod.status.phase == "Running":
            fail(world, [p.metadata.name for p in world.workers()].index(pod.metadata.name))
    world.settle()
    world.pass_time(seconds=10)
    world.settle()
    assert (world.job.status.restarts, world.job.status.disruptions) == (0, 2)


def test_delays_grow_and_are_seen_and_a_gang_that_lasted_resets_them():
    world = running(maxRestarts=9)
    waits = []
    for _ in range(4):
        fail(world)
        plan = world.settle()
        waits.append(plan.requeue_after or 0)
        if waits[-1]:
            assert world.phase == "Queued", "a gang that follows is no failed job"
            assert (world.job.status.reason) == "BackingOff"
            placed = next(c for c in world.job.status.conditions if c.type == "Scheduled")
            assert (placed.status, placed.reason) == ("False", "BackingOff"), "no pod waits"
        world.pass_time(seconds=waits[-1])
        world.settle()
        world.containers_stop()
        world.all_workers("Running")
        world.settle()
    assert waits == [0, 10, 20, 40]
    world.pass_time(minutes=11)
    fail(world)
    assert world.settle().requeue_after is None
    assert world.phase == "Queued"
    world.containers_stop()
    world.all_workers("Running")
    world.settle()
    fail(world)
    assert world.settle().requeue_after is None, "the first after one that lasted"


def test_pauses_do_not_make_the_next_failure_wait():
    world = running()
    world.spec(suspend=True)
    world.settle()
    world.containers_stop()
    world.settle()
    world.spec(suspend=False)
    world.settle()
    world.all_workers("Running")
    world.settle()
    fail(world)
    assert world.settle().requeue_after is None
    assert world.job.status.attempt == 2


def test_a_crash_before_the_status_counts_nothing_twice_and_loses_nothing():
    world = running()
    fail(world, message='{"rank": 0, "message": "ValueError: bad", "exitCode": 1}')
    before = world.job.status
    world.step()
    world.job = replace(world.job, status=before)
    world.settle()
    status = world.job.status
    assert (status.attempt, status.restarts, status.disruptions) == (1, 1, 0)
    assert [a.number for a in status.attempts] == [0]
    assert "ValueError: bad" in status.attempts[0].message
    assert world.created.count((JOBS.plural, "train-r1")) == 1


def test_two_crashes_in_a_row_before_the_status_lose_nothing_either():
    world = running()
    before = world.job.status
    for attempt in ("first", "second"):
        fail(world, message=f'{{"rank": 0, "message": "ValueError: {attempt}", "exitCode": 1}}')
        world.step()
        world.job = replace(world.job, status=before)
        world.containers_stop()
        world.all_workers("Running")
    world.settle()
    status = world.job.status
    assert (status.attempt, status.restarts) == (2, 2)
    assert [(a.number, a.counted) for a in status.attempts] == [(0, True), (1, True)]
    assert ["ValueError: first" in a.message for a in status.attempts] == [True, False]


def test_annotations_that_make_no_sense_are_no_trouble():
    world = running()
    fail(world)
    before = world.job.status
    world.step()
    child = world.objects[JOBS.plural, "train-r1"]
    odd = replace(child.metadata.annotations, cause="{", restarts="x")
    world.objects[JOBS.plural, "train-r1"] = replace(
        child, metadata=replace(child.metadata, annotations=odd)
    )
    world.job = replace(world.job, status=before)
    world.settle()
    assert (world.job.status.attempt, world.job.status.attempts) == (1, ())


def test_a_deleted_job_leaves_the_failure_before_it_counted_once():
    world = running(maxRestarts=1)
    fail(world)
    world.settle()
    world.containers_stop()
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 1)
    world.delete_child_job()
    world.settle()
    world.pass_time(seconds=10)
    world.settle()
    assert (world.phase, world.job.status.attempt, world.job.status.restarts) == ("Queued", 2, 1)
    world.delete_child_job()
    world.spec(suspend=True)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Suspended", 2), "no number is used again"


def test_only_the_last_attempts_and_their_jobs_are_kept():
    world = running(nodes=1, maxRestarts=20)
    for _ in range(8):
        fail(world)
        world.pass_time(minutes=11)
        world.settle()
        world.all_workers("Running")
        world.settle()
    assert [a.number for a in world.job.status.attempts] == [3, 4, 5, 6, 7]
    kept = sorted(name for plural, name in world.objects if plural == JOBS.plural)
    assert kept == ["train-r4", "train-r5", "train-r6", "train-r7", "train-r8"]


def test_a_failure_whose_restart_waits_for_the_queue_is_counted_once():
    world = running()
    fail(world)
    world.queue = None
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "QueueNotFound")
    assert world.job.status.restarts == 1
    world.queue = make_queue()
    world.settle()
    assert (world.phase, world.job.status.restarts, world.job.status.attempt) == ("Queued", 1, 1)


@pytest.mark.parametrize(
    ("rules", "ended", "phase", "restarts", "disruptions"),
    [
        ([{"exitCodes": [3], "action": "fail"}], {"exit_code": 3}, "Failed", 0, 0),
        ([{"exitCodes": [3], "action": "fail"}], {"exit_code": 4}, "Queued", 1, 0),
        ([{"exitCodes": [3], "action": "ignore"}], {"exit_code": 3}, "Queued", 0, 1),
        ([{"signals": [9], "action": "fail"}], {"exit_code": 137}, "Failed", 0, 0),
        (
            [{"exitCodes": [3], "action": "ignore"}, {"exitCodes": [3, 4], "action": "fail"}],
            {"exit_code": 3},
            "Queued",
            0,
            1,
        ),
    ],
)
def test_the_first_rule_that_matches_decides(rules, ended, phase, restarts, disruptions):
    world = running(rules=rules)
    fail(world, **ended)
    world.settle()
    status = world.job.status
    assert (world.phase, status.restarts, status.disruptions) == (phase, restarts, disruptions)


def test_a_rule_may_name_pod_conditions():
    world = running(rules=[{"podConditions": ["DisruptionTarget"], "action": "fail"}])
    disrupt(world)
    world.settle()
    assert world.phase == "Failed"


def test_never_means_never():
    world = running(restartPolicy="Never")
    disrupt(world)
    world.settle()
    assert world.phase == "Failed"
    assert "restartPolicy is Never" in world.job.status.message


def test_a_rule_that_can_never_match_is_refused():
    rules = [{"exitCodes": [1, 2], "action": "fail"}, {"exitCodes": [2], "action": "ignore"}]
    with pytest.raises(InvalidSpecError, match=r"rules\[1\]"):
        resolve_spec(make_job(numNodes=1, reliability={"rules": rules}), make_queue())
    assert unreachable(()) is None


def test_the_queue_lends_its_reliability():
    queue = make_queue(reliability={"maxRestarts": 0})
    world = World(make_job(numNodes=1), queue)
    world.settle()
    fail(world)
    world.settle()
    assert world.phase == "Failed"


def test_a_job_whose_pods_vanished_without_a_word_is_disrupted():
    world = running(maxRestarts=0)
    for key in [k for k in world.objects if k[0] == PODS.plural]:
        del world.objects[key]
    world.job_condition("Failed", "BackoffLimitExceeded", "too many")
    world.settle()
    assert (world.phase, world.job.status.disruptions) == ("Queued", 1)


def test_survivors_of_a_job_that_failed_are_ended():
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
    assert len(world.step().deletes) == 1, "also where the first attempt was lost"


def test_a_disruption_without_words_is_still_one():
    world = running(maxRestarts=0)
    pod = world.workers()[0]
    condition = Condition(type="DisruptionTarget", status="True", last_transition_time=START)
    world.pod(pod.metadata.name, phase="Failed", conditions=(condition,))
    world.settle()
    assert world.job.status.last_failure.reason == "DisruptionTarget"
    assert timedelta() == world.job.status.last_failure.time - START


def test_go_ahead_is_given_by_annotation_only():
    world = running()
    fail(world)
    world.settle()
    world.containers_stop()
    applies = world.plan().applies
    assert {apply.kind for apply in applies} == {PODS}
    for apply in applies:
        assert set(apply.body["metadata"]) == {"name", "namespace", "annotations"}
        told = {names.START: "1", names.TOLD: "2026-01-02T03:04:05Z"}
        assert apply.body["metadata"]["annotations"] == told
