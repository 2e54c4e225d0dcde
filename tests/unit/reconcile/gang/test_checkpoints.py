"""The last checkpoints in the status, and their way into the next gang."""

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest

from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_api.kinds.status import Checkpoint
from torchrun_controller.reconcile.gang.checkpoints import annotate, find_known, merge
from unit.reconcile.gang.test_restarts_in_place_resumed import resumed
from world import START, World, make_job, make_queue

JOB = ("ml", "train")


def saved(step: int, path: str = "", seconds: float | None = None) -> Checkpoint:
    time = START + timedelta(seconds=step if seconds is None else seconds)
    return Checkpoint(step=step, path=path or f"/checkpoints/{step}", time=time)


def message_of(*checkpoints: Checkpoint, **more: object) -> str:
    bodies = [
        {"step": c.step, "path": c.path, "time": c.time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
        for c in checkpoints
    ]
    return json.dumps({**more, "checkpoints": bodies})


def running(nodes: int = 2) -> World:
    world = World(make_job(numNodes=nodes), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def report(world: World, *checkpoints: Checkpoint) -> None:
    world.reports.put_checkpoints(JOB, world.job.metadata.uid, checkpoints)


def in_status(world: World) -> list[int]:
    status = world.job.status
    if status.last_checkpoint is None:
        return []
    return [status.last_checkpoint.step, *(each.step for each in status.earlier_checkpoints)]


def annotated(pod: Pod) -> list[int]:
    text = pod.metadata.annotations.checkpoints
    assert text.isascii()
    return [body["step"] for body in json.loads(text or "[]")]


def fail(world: World, message: str = "") -> None:
    leader = world.workers()[0].metadata.name
    world.end_container(leader, "trainer", exit_code=1, message=message)


def test_the_newest_three_are_kept_and_one_for_each_path() -> None:
    assert merge([saved(1), saved(4)], [saved(3), saved(2)]) == (saved(4), saved(3), saved(2))
    older, newer = saved(1, "/last"), saved(2, "/last")
    assert merge([newer], [older, saved(3)]) == (saved(3), newer)


def test_the_time_decides_not_the_step() -> None:
    """The ranks may resume from an older checkpoint."""
    assert merge([saved(9, seconds=1)], [saved(5, seconds=2)])[0].step == 5


def test_a_time_that_does_not_exist_in_utc_is_no_checkpoint() -> None:
    first = datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))
    assert merge([Checkpoint(step=1, path="/x", time=first)]) == ()


def test_the_first_report_is_shown_at_once_and_others_within_ten_seconds() -> None:
    world = running()
    writes = 0
    for step in range(1, 61):
        world.pass_time(seconds=1)
        checkpoint = Checkpoint(step=step, path=f"/checkpoints/{step}", time=world.now)
        report(world, checkpoint)
        plan = world.step()
        writes += plan.status is not None
        assert step > 1 or in_status(world) == [1]
        assert plan.requeue_after is not None or in_status(world)[0] == step
    assert writes == 6
    assert in_status(world)[0] > 50


@pytest.mark.parametrize("in_message", [False, True])
def test_the_last_one_before_the_end_is_in_the_status_and_in_the_next_gang(
    in_message: bool,
) -> None:
    world = running()
    report(world, Checkpoint(step=1, path="/checkpoints/1", time=world.now))
    world.step()
    last = Checkpoint(step=2, path="/checkpoints/2", time=world.now + timedelta(seconds=1))
    if in_message:
        fail(world, message_of(last, reason="Exception", message="ValueError"))
    else:
        report(world, last)
        fail(world)
    world.settle()
    world.pass_backoff()
    world.settle()
    assert in_status(world) == [2, 1]
    assert world.job.status.attempt == 1
    assert [annotated(pod) for pod in world.workers()] == [[2, 1], [2, 1]]


def test_a_successful_job_shows_its_last_checkpoint() -> None:
    world = running(nodes=1)
    leader = world.workers()[0].metadata.name
    world.end_container(leader, "trainer", exit_code=0, message=message_of(saved(7)))
    world.pod(leader, phase="Succeeded")
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    assert in_status(world) == [7]


def test_a_checkpoint_that_arrives_after_the_end_of_the_job_is_shown() -> None:
    world = World(make_job(numNodes=2, reliability={"maxRestarts": 0}), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    fail(world)
    world.settle()
    assert world.phase == "Failed"
    report(world, saved(3))
    world.settle()
    assert in_status(world) == [3]


@pytest.mark.parametrize(
    "message",
    [
        "x",
        '{"checkpoints": 3}',
        '{"checkpoints": [{"step": -1, "path": "/x", "time": "2026-01-01T00:00:00Z"}]}',
        '{"checkpoints": [{"step": 1, "path": "", "time": "2026-01-01T00:00:00Z"}]}',
        '{"checkpoints": [{"step": 1, "path": "/x", "time": "2026-01-01T00:00:00"}]}',
        json.dumps({"checkpoints": [{"step": 1, "path": "x" * 1025, "time": "2026-01-01T00:00Z"}]}),
    ],
)
def test_an_invalid_claim_hides_neither_the_failure_nor_what_is_known(message: str) -> None:
    world = running()
    report(world, saved(1))
    world.step()
    body = json.loads(message) if message.startswith("{") else {}
    fail(world, json.dumps({**body, "reason": "Exception", "message": "ValueError: no"}))
    world.settle()
    assert in_status(world) == [1]
    failure = world.job.status.last_failure
    assert failure is not None
    assert failure.message.endswith("ValueError: no")


def test_messages_of_other_nodes_say_nothing_about_checkpoints() -> None:
    world = running()
    other = world.workers()[1].metadata.name
    world.end_container(other, "trainer", exit_code=1, message=message_of(saved(3)))
    world.settle()
    assert in_status(world) == []


def test_a_report_of_an_older_gang_replaces_nothing_newer() -> None:
    world = running()
    report(world, saved(5))
    world.step()
    report(world, saved(2))
    world.pass_time(seconds=60)
    world.step()
    assert in_status(world)[0] == 5


def test_a_job_of_the_same_name_inherits_nothing() -> None:
    world = running()
    world.reports.put_checkpoints(JOB, "uid-of-an-earlier-job", (saved(5),))
    world.step()
    assert in_status(world) == []


def test_the_pods_of_a_resumed_job_get_the_newest_checkpoints() -> None:
    world = resumed()
    report(world, saved(8))
    world.settle_twice()
    leader, follower = world.workers()
    assert annotated(leader) == [8]
    assert annotated(follower) == [], "it follows the leader"
    assert leader.metadata.annotations.restarts_in_place == "2 3"


def test_the_last_words_of_a_pod_whose_job_is_gone_are_read() -> None:
    world = running()
    pod = world.workers()[0]
    leader = pod.metadata.name
    world.delete_child_job()
    world.objects[PODS.plural, leader] = pod  # it still ends
    world.end_container(leader, "trainer", exit_code=143, message=message_of(saved(4)))
    gang = world.observed().gang
    assert not gang.child_jobs
    assert [each.step for each in find_known(world.job.status, gang)] == [4]


def test_the_annotation_is_ascii_and_has_microseconds() -> None:
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    (text,) = annotate((Checkpoint(step=1, path='/ä "x"', time=time),)).values()
    assert text == (
        '[{"step": 1, "path": "/\\u00e4 \\"x\\"", "time": "2026-01-02T03:04:05.000000Z"}]'
    )
    assert annotate(()) == {}
    assert names.COMPLETE_CHECKPOINTS == "torchrun.ai/checkpoints"


def test_the_first_gang_has_no_annotation() -> None:
    world = running()
    (job,) = (apply for plan in world.plans for apply in plan.applies if apply.kind is JOBS)
    assert "torchrun.ai/checkpoints" not in json.dumps(job.body)
