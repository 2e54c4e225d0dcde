"""A peer loss is not the root cause if the peer reports its own failure."""

import json

import pytest
from msgspec.structs import replace

from torchrun_runtime.launch.failure import Report, find_cause
from torchrun_runtime.launch.supervise import CommandExit
from unit.reconcile.failing import fail, running

PEER = '{"rank": 0, "exitCode": 1, "message": "RuntimeError: Connection closed by peer [10.0.0.2]"}'
CAUSE = '{"rank": 1, "exitCode": 7, "message": "ValueError: bad batch"}'


def test_a_peer_loss_waits_for_the_failure_of_the_peer():
    world = running(rules=[{"exitCodes": [7], "action": "fail"}])
    fail(world, 0, message=PEER)
    world.pass_time(seconds=1)
    plan = world.step()
    assert (world.phase, plan.applies, plan.requeue_after) == ("Running", (), 9)
    fail(world, 1, message=CAUSE, exit_code=7)
    world.step()
    assert world.phase == "Failed"
    assert world.job.status.last_failure.rank == 1


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: Connection reset by peer",
        "RuntimeError: Connection was aborted",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "RuntimeError: Read error [10.0.0.2]:41: Software caused connection abort",
        "DistBackendError: ncclRemoteError: A call failed possibly due to a network error",
        "RuntimeError: [gloo/transport/tcp/pair.cc] writeAny: Bad file descriptor",
    ],
)
def test_what_a_launcher_takes_for_a_peer_loss_waits_for_the_failure_of_the_peer(message):
    root_cause = find_cause(
        CommandExit(1, None, None, None, for_next_round=False, has_survivors=False),
        [
            Report(7, 1.0, 0, "RuntimeError", message, []),
            Report(8, 2.0, 1, "ValueError", "ValueError: bad batch", []),
        ],
        3.0,
        out_of_memory=False,
    )
    assert root_cause.rank == 1
    world = running()
    fail(world, 0, message=json.dumps({"rank": 0, "exitCode": 1, "message": message}))
    assert (world.step().applies, world.phase) == ((), "Running")


def test_a_peer_loss_alone_is_the_cause():
    world = running()
    fail(world, 0, message=PEER)
    world.pass_time(seconds=10)
    world.pass_backoff()
    assert [apply.name for apply in world.step().applies][1:] == ["train-r1"]


def test_no_wait_after_every_worker_has_ended():
    world = running()
    fail(world, 0, message=PEER)
    fail(world, 1, message=PEER)
    world.pass_backoff()
    assert [apply.name for apply in world.step().applies][1:] == ["train-r1"]


def test_the_root_cause_counts_even_if_the_peer_loss_came_first():
    world = running()
    fail(world, 0, message=PEER)
    world.pass_time(seconds=1)
    fail(world, 1, message=CAUSE)
    world.step()
    assert "ValueError: bad batch (rank 1" in world.job.status.attempts[0].message


@pytest.mark.parametrize("ahead", [1, 300])
def test_the_cause_is_awaited_although_the_clock_of_the_controller_is_behind(ahead):
    world = running()
    world.pass_time(seconds=ahead)
    fail(world, 0, message=PEER)
    world.pass_time(seconds=-ahead)
    plan = world.step()
    assert (world.phase, plan.applies, plan.requeue_after) == ("Running", (), 10)


def test_a_clock_that_is_far_behind_delays_nothing():
    world = running()
    world.pass_time(seconds=302)
    fail(world, 0, message=PEER)
    world.pass_time(seconds=-301)
    world.settle()
    assert [gang.metadata.name for gang in world.gangs] == ["train", "train-r1"]


STOPPED = '{"exitCode": 143, "reason": "PeerFailed", "message": "The ranks were stopped."}'


def test_a_node_that_was_stopped_is_not_the_cause():
    world = running(rules=[{"exitCodes": [7], "action": "fail"}])
    fail(world, 0, message=STOPPED, exit_code=143)
    world.pass_time(seconds=1)
    plan = world.step()
    assert (world.phase, plan.applies, plan.requeue_after) == ("Running", (), 9)
    fail(world, 1, message=CAUSE, exit_code=7)
    world.step()
    assert world.phase == "Failed"
    assert (world.job.status.last_failure.rank, world.job.status.last_failure.exit_code) == (1, 7)


def test_a_node_that_was_stopped_waits_for_the_cause_on_a_deleted_pod():
    world = running(rules=[{"exitCodes": [7], "action": "fail"}])
    fail(world, 0, message=STOPPED, exit_code=143)
    pod = world.workers()[1]
    meta = replace(pod.metadata, deletion_timestamp=world.now, deletion_grace_period_seconds=0)
    world.objects["pods", pod.metadata.name] = replace(pod, metadata=meta)
    world.step()
    assert world.phase == "Running", "the Job controller deletes the other pods of a failed Job"
    fail(world, 1, message=CAUSE, exit_code=7)
    world.step()
    assert (world.phase, world.job.status.last_failure.exit_code) == ("Failed", 7)
