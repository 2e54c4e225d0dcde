"""Termination messages of users' programs and values of annotations are read, shown or ignored."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import malformed
from torchrun_api.kinds.core import Job
from torchrun_api.kinds.resources import JOBS
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.gang import gang
from unit.reconcile.failing import fail, running
from world import ZIP, World, make_job, make_queue

LONGEST = 4096  # bytes of a termination message
messages = malformed.texts(
    {
        "rank": 1,
        "exitCode": 7,
        "signal": 9,
        "reason": "Exception",
        "message": "ValueError: bad batch",
        "time": "2026-01-02T03:04:05Z",
        "commit": "abc",
        "sha256": "def",
        "manifest": "ghi",
        "revision": 3,
        "bytes": 12,
        "permanent": False,
    }
).map(lambda text: text.decode(errors="replace")[:LONGEST])


def check(world: World) -> None:
    """Check that the API server would accept this status."""
    status = world.job.status
    msgspec.json.decode(msgspec.json.encode(status), type=TorchrunJobStatus)
    for number in numbers(msgspec.to_builtins(status)):
        assert -(2**63) <= number < 2**63, status
    left = world.plan().requeue_after
    assert left is None or 0 <= left < 600, left
    for condition in status.conditions:
        assert len(condition.message) <= 1024
        assert len(condition.reason) <= 1024, condition


def numbers(value: Any) -> list[int]:
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return [number for each in inner for number in numbers(each)]
    return [value] if isinstance(value, int) else []


@pytest.mark.parametrize(
    "text",
    [
        '{"x": ' + "[" * 4000,
        '{"rank": 99999999999999999999, "message": "it broke"}',
        '{"exitCode": -9223372036854775808, "message": "it broke"}',
        '{"time": "2026-01-02T03:04:05", "message": "it broke"}',
        '{"reason": "no word at all", "message": "it broke"}',
    ],
    ids=["deep", "rank", "exit code", "time without an offset", "reason"],
)
def test_messages_beyond_the_limits_are_shown_as_text(text: str) -> None:
    world = running()
    fail(world, 0, message=text, exit_code=3)
    world.settle()
    (ended,) = world.job.status.attempts
    assert (world.job.status.attempt, ended.reason) == (1, "ExitCode")
    assert text[:50] in ended.message
    check(world)


def test_a_worker_does_not_end_later_than_its_container() -> None:
    world = running()
    fail(world, 0, message='{"time": "9999-12-31T23:59:59Z", "message": "later"}')
    world.pass_time(seconds=1)
    fail(world, 1, message='{"message": "first by its own clock"}', finished_at=world.now)
    world.step()
    failure = world.job.status.last_failure
    assert failure is not None
    assert "later" in failure.message


def test_the_first_failure_within_a_second_is_the_cause() -> None:
    world = running()
    fail(world, 0, message='{"time": "2026-01-02T03:04:05.7Z", "message": "second"}')
    fail(world, 1, message='{"time": "2026-01-02T03:04:05.2Z", "message": "first"}')
    world.step()
    failure = world.job.status.last_failure
    assert failure is not None
    assert "first" in failure.message


@settings(deadline=None)
@given(messages, st.none() | messages)
def test_messages_of_workers_fail_or_restart_their_job(first: str, second: str | None) -> None:
    world = running(maxRestarts=1)
    fail(world, 0, message=first)
    if second is not None:
        fail(world, 1, message=second)
    world.step()
    check(world)
    world.pass_time(seconds=40)
    world.step()
    check(world)
    assert (world.phase, world.job.status.attempt) != ("Running", 0)


@settings(deadline=None)
@given(messages, st.integers(0, 1))
def test_messages_of_sync_pods_are_shown(message: str, exit_code: int) -> None:
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.end_container("train-sync-0", "sync", exit_code=exit_code, message=message)
    world.step()
    check(world)


@settings(deadline=None)
@given(messages | malformed.values.map(json.dumps))
def test_values_of_annotations_are_read_or_ignored(text: str) -> None:
    world = running()
    (key,) = [key for key in world.objects if key[0] == JOBS.plural]
    child: Job = world.objects[key]
    annotations = msgspec.structs.replace(child.metadata.annotations, cause=text)
    metadata = msgspec.structs.replace(child.metadata, annotations=annotations)
    world.objects[key] = msgspec.structs.replace(child, metadata=metadata)
    world.job = msgspec.structs.replace(world.job, status=TorchrunJobStatus(attempt=0))
    gang.unrecorded_ends(world.observed().job, world.observed().gang)
    world.step()
    check(world)
