"""The root cause of a failed gang, from the status of its pods."""

import json
from datetime import timedelta

import pytest

from world import START, World, make_job, make_queue


@pytest.fixture
def world() -> World:
    failed_world = World(make_job(numNodes=3, reliability={"maxRestarts": 0}), make_queue())
    failed_world.settle()
    failed_world.all_workers("Running")
    failed_world.settle()
    return failed_world


def verdict(rank: int, message: str, seconds: float, **more: object) -> str:
    time = (START + timedelta(seconds=seconds)).isoformat()
    return json.dumps({"rank": rank, "message": message, "time": time, "exitCode": 1, **more})


def fail(world: World, index: int, **ended: object) -> None:
    world.end_container(f"train-{index}-abcde", "trainer", **{"exit_code": 1, **ended})


def test_the_first_failure_by_time_is_the_cause(world):
    fail(world, 0, message=verdict(0, "RuntimeError: Connection closed by peer", 2.0))
    fail(world, 2, message=verdict(2, "ValueError: bad batch", 1.5))
    world.settle()
    failure = world.job.status.last_failure
    assert (failure.rank, failure.exit_code, failure.node) == (2, 1, "node-1")
    assert "ValueError: bad batch" in world.job.status.message
    assert world.phase == "Failed"


def test_a_later_root_cause_replaces_a_secondary_failure(world):
    world.pass_time(seconds=12)
    fail(world, 0, message=verdict(0, "RuntimeError: Connection closed by peer", 2.0))
    world.settle()
    assert "Connection closed" in world.job.status.message
    fail(world, 1, message=verdict(1, "ValueError: bad batch", 1.0))
    world.settle()
    assert world.phase == "Failed"
    assert "bad batch" in world.condition("Failed").message
    fail(world, 2, message=verdict(2, "late", 9.0))
    world.settle()
    assert "bad batch" in world.condition("Failed").message


def test_oom_beats_signals_and_signals_beat_exceptions(world):
    fail(world, 0, message=verdict(0, "boom", 1.0))
    world.settle()
    fail(world, 1, exit_code=139, finished_at=START + timedelta(seconds=5))
    world.settle()
    assert (world.job.status.last_failure.signal, world.job.status.reason) == (11, "Signaled")
    fail(world, 2, exit_code=137, reason="OOMKilled", finished_at=START + timedelta(seconds=9))
    world.settle()
    assert world.job.status.reason == "OOMKilled"
    assert "memory limit" in world.job.status.message


def test_an_exception_comes_before_an_abort_which_comes_before_a_lost_peer(world):
    fail(world, 0, message=verdict(0, "RuntimeError: Connection closed by peer", 1.0))
    fail(world, 1, exit_code=134, finished_at=START + timedelta(seconds=2))
    world.settle()
    assert world.job.status.last_failure.signal == 6
    fail(world, 2, message=verdict(2, "ValueError: bad batch", 3.0))
    world.settle()
    assert world.job.status.last_failure.rank == 2


def test_a_forwarded_sigterm_is_no_cause(world):
    fail(world, 0, exit_code=143, finished_at=START)
    fail(world, 1, message=verdict(1, "KeyError: 'x'", 3.0))
    world.settle()
    assert world.job.status.last_failure.rank == 1


@pytest.mark.parametrize(
    ("seconds", "reason", "rank"),
    [(9, "", 1), (1, "", None), (9, "OOMKilled", None)],
    ids=["after its grace period", "before the deletion", "out of memory"],
)
def test_a_survivor_that_is_killed_after_its_deletion_is_no_cause(
    world, seconds: float, reason: str, rank: int | None
):
    """On a slow node a worker may not end within the grace period that the controller gives it."""
    world.pass_time(seconds=4)
    fail(world, 1, message=verdict(1, "ValueError: bad batch", 3.0))
    world.settle()
    assert world.job.status.last_failure.rank == 1
    name = ("pods", "train-0-abcde")
    assert world.objects[name].metadata.terminating, "the controller deletes survivors"
    killed = START + timedelta(seconds=seconds)
    fail(world, 0, exit_code=137, reason=reason, finished_at=killed)
    world.settle()
    assert (world.phase, world.job.status.last_failure.rank) == ("Failed", rank)


@pytest.mark.parametrize(
    ("reason", "exit_code"),
    [("Unknown", 255), ("ContainerStatusUnknown", 137)],
    ids=["containerd", "kubelet"],
)
def test_a_container_without_an_exit_status_is_a_disruption(reason: str, exit_code: int) -> None:
    world = World(make_job(numNodes=3, reliability={"maxRestarts": 0}), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    fail(world, 0, message=verdict(0, "ValueError: of no rank of the restarted node", 1.0))
    fail(world, 1, exit_code=exit_code, reason=reason, message="the end of the log")
    world.settle()
    status = world.job.status
    end = status.attempts[0]
    assert (end.reason, end.counted, end.node) == ("ContainerStatusUnknown", False, "node-1")
    assert "its machine restarted" in end.message
    assert (status.restarts, status.disruptions, world.phase) == (0, 1, "Queued")
    assert (status.last_failure.exit_code, status.last_failure.signal) == (None, None)


def test_the_report_of_a_launcher_counts_without_an_exit_status(world):
    message = verdict(1, "ValueError: bad batch", 1.0, reason="Exception")
    fail(world, 1, exit_code=255, reason="Unknown", message=message)
    world.settle()
    assert (world.job.status.reason, world.phase) == ("Exception", "Failed")


def test_an_evicted_pod_has_a_reason(world):
    world.pod("train-1-abcde", phase="Failed", reason="Evicted", message="low on memory")
    world.settle()
    assert (world.job.status.reason, world.phase) == ("Evicted", "Failed")
    assert "low on memory" in world.job.status.message


@pytest.mark.parametrize(
    ("message", "reason", "shown"),
    [
        (
            'runc create failed: exec: "python3": executable file not found in $PATH: unknown',
            "PythonMissing",
            "Use an image with Python 3.8 or later",
        ),
        (
            "crun: executable file `python3` not found in $PATH: No such file or directory",
            "PythonMissing",
            "such as PATH=/opt/conda/bin",
        ),
        ("error mounting /data: not a directory", "StartError", "error mounting /data"),
        ("", "StartError", "The container cannot start."),
    ],
)
def test_a_container_that_does_not_start_has_a_reason(world, message, reason, shown):
    fail(world, 0, exit_code=128, reason="StartError", message=message)
    world.settle()
    failure = world.job.status.last_failure
    assert (failure.reason, world.phase) == (reason, "Failed")
    assert shown in failure.message


def test_other_termination_messages_are_shown_unchanged(world):
    fail(world, 0, exit_code=3, message="some log\nlast words\n")
    world.settle()
    assert world.job.status.last_failure.exit_code == 3
    assert "last words" in world.job.status.message


@pytest.mark.parametrize(("seconds", "shown"), [(-5, -5), (0.9, 0.9), (1, 0)])
def test_the_time_of_the_launcher_counts_unless_it_is_after_the_end(
    world: World, seconds: float, shown: float
) -> None:
    end = START + timedelta(minutes=1)
    fail(world, 0, message=verdict(0, "late", 60 + seconds), finished_at=end)
    world.settle()
    assert world.job.status.last_failure is not None
    assert world.job.status.last_failure.time == end + timedelta(seconds=shown)


def test_a_failed_init_container_is_the_cause(world):
    world.end_container("train-0-abcde", "launcher", exit_code=1, message="cp: no space left")
    world.settle()
    assert "no space left" in world.job.status.message


def test_a_failed_pod_without_a_message_is_named(world):
    world.pod("train-2-abcde", phase="Failed")
    world.settle()
    assert "train-2-abcde" in world.job.status.message


def test_a_failed_job_without_pods_has_the_message_of_its_controller(world):
    world.job_condition("Failed", "DeadlineExceeded", "too long")
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "DeadlineExceeded")
    assert world.plan().status is None


def test_workers_are_counted(world):
    world.pod("train-0-abcde", phase="Succeeded")
    world.settle()
    counts = world.job.status.workers
    assert (counts.running, counts.succeeded, counts.pending, counts.failed) == (2, 1, 0, 0)
