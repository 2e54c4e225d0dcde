"""Ranks that stopped together, because a pod was asked to end, have neither failed nor finished."""

import json

import pytest

from torchrun_api.names import TRAINER_CONTAINER
from unit.reconcile.failing import running
from world import World

EACH = {"exitCode": 143, "signal": 15, "message": "All ranks stopped at call 52."}
ASKED = json.dumps({**EACH, "reason": "Stopped"})
PEER = json.dumps({**EACH, "reason": "PeerStopped"})


def end(world: World, index: int, message: str) -> None:
    name = world.workers()[index].metadata.name
    ended = {"exit_code": 143, "message": message, "finished_at": world.now}
    world.end_container(name, TRAINER_CONTAINER, **ended)


def test_a_drained_pod_is_the_cause_and_not_its_peers() -> None:
    world = running(maxRestarts=0)
    world.drain(world.workers()[1].metadata.name)
    end(world, 0, PEER)
    world.settle()
    status = world.job.status
    assert (status.phase, status.restarts, status.disruptions) == ("Queued", 0, 1)
    assert status.last_failure is not None
    assert status.last_failure.reason == "Drained"


def test_the_drained_pod_may_be_gone_before_its_peers_end() -> None:
    world = running(maxRestarts=0)
    world.remove(world.workers()[1].metadata.name)
    end(world, 0, PEER)
    world.pass_time(seconds=11)
    world.settle()
    status = world.job.status
    assert (status.phase, status.restarts, status.disruptions) == ("Queued", 0, 1)


def test_the_end_of_a_peer_waits_for_the_pod_that_was_asked() -> None:
    world = running(maxRestarts=0)
    end(world, 0, PEER)
    world.pass_time(seconds=1)
    assert (world.step().applies, world.phase) == ((), "Running")
    world.drain(world.workers()[1].metadata.name)
    world.settle()
    assert world.job.status.last_failure is not None
    assert world.job.status.last_failure.reason == "Drained"


def test_a_pod_that_nobody_deleted_fails_as_before() -> None:
    world = running(maxRestarts=0)
    end(world, 0, PEER)
    end(world, 1, ASKED)
    world.pass_time(seconds=11)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "Stopped")


@pytest.mark.parametrize("stop", ["suspend", "preempt"])
def test_a_job_whose_pods_end_before_their_jobs_are_deleted_is_suspended_or_preempted(
    stop: str,
) -> None:
    world = running(maxRestarts=0)
    world.preempt() if stop == "preempt" else world.spec(suspend=True)
    end(world, 0, ASKED)
    end(world, 1, ASKED)
    world.settle()
    status = world.job.status
    ended = [attempt.reason for attempt in status.attempts]
    assert ended == [{"suspend": "Suspended", "preempt": "Preempted"}[stop]]
    assert (status.restarts, status.disruptions) == (0, 0)
