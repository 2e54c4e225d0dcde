"""A job whose attempts and rounds get no further ends, instead of using machines for nothing."""

import json

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.status import Attempt, Checkpoint, Progress, TorchrunJobStatus
from torchrun_controller.reconcile.gang.headway import find_stagnation
from torchrun_controller.reconcile.model.plan import Event
from unit.reconcile.failing import disrupt, fail, running
from world import World


def report(world: World, step: int | None) -> None:
    """Rank 0 reports this step, and the status has it."""
    world.pass_time(seconds=15)
    if step is not None:
        child = world.observed().gang.current_job.metadata.uid
        world.reports.put(("ml", "train"), child, Progress(step=step, time=world.now))
    world.settle()
    world.pass_time(seconds=15)


def start_again(world: World) -> None:
    world.settle()
    world.containers_stop()
    if world.phase not in ("Failed", "Running"):
        world.settle()
        world.all_workers("Running")
        world.settle()


def end(world: World, how: str, step: int | None) -> None:
    """The ranks reach this step, and then they end in this way; the next ones run, if there are."""
    if how == "round":  # its launcher reports the step, also where no report of rank 0 arrived
        world.pass_time(seconds=30)
        world.restart_in_place(step=step)
        world.settle()
        return
    report(world, step)
    match how:
        case "gang":
            fail(world)
        case "lost":
            disrupt(world)
        case "suspended":
            world.suspend()
            world.resume()
    start_again(world)


GANG, ROUND, LOST, SUSPENDED = "gang", "round", "lost", "suspended"


@pytest.mark.parametrize(
    ("ends", "stops"),
    [
        pytest.param([(GANG, 100), (GANG, 90), (GANG, 100), (GANG, 80)], True, id="gangs"),
        pytest.param([(ROUND, 100), (ROUND, 90), (ROUND, 100), (ROUND, 80)], True, id="rounds"),
        pytest.param([(ROUND, 100), (ROUND, 90), (GANG, 80), (ROUND, 70)], True, id="both"),
        pytest.param([(GANG, 100), (GANG, None), (GANG, None), (GANG, None)], True, id="no step"),
        pytest.param([(GANG, 100), (GANG, 90), (GANG, 80)], False, id="two"),
        pytest.param([(GANG, 100), (GANG, 90), (GANG, 101), (GANG, 80)], False, id="a newer step"),
        pytest.param([(ROUND, 100), (ROUND, 90), (ROUND, 101), (ROUND, 80)], False, id="a round"),
        pytest.param([(GANG, None)] * 4, False, id="nothing was ever reported"),
        pytest.param([(ROUND, None)] * 4, False, id="no round ever reported"),
        pytest.param([(LOST, 100), (LOST, 90), (LOST, 80), (LOST, 70)], False, id="lost machines"),
        pytest.param([(GANG, 100), *[(SUSPENDED, 90)] * 4], False, id="suspensions"),
        pytest.param(
            [(GANG, 100), (GANG, 90), (LOST, 80), (SUSPENDED, 80), (GANG, 90), (GANG, 90)],
            True,
            id="others in between",
        ),
        pytest.param(
            [(GANG, 100), (GANG, 90), (GANG, 90), (LOST, 110), (GANG, 90)],
            False,
            id="a lost one got further",
        ),
    ],
)
def test_a_job_ends_after_three_failures_that_get_no_further(
    ends: list[tuple[str, int | None]], stops: bool
):
    world = running(maxRestarts=100)
    for how, step in ends[:-1]:
        end(world, how, step)
        assert (world.phase, world.job.status.reason) == ("Running", "WorkersRunning")
    end(world, *ends[-1])
    assert world.phase == ("Failed" if stops else "Running")
    assert (world.job.status.reason == "NoProgress") is stops


def test_the_message_says_what_was_reached_and_what_to_do():
    world = running(maxRestarts=100)
    end(world, ROUND, 1250)
    end(world, GANG, 1210)
    end(world, ROUND, 1200)
    report(world, None)
    fail(world, message=json.dumps({"reason": "Exception", "message": "KeyError: 'x'"}))
    plan = world.step()
    message = (
        "The last 3 failures came with no newer step than 1250: attempt 0 (step 1210), attempt 1,"
        " round 0 (step 1200), attempt 1 (no step). Correct the cause and submit the job again. To"
        " allow more of them, set reliability.maxAttemptsWithoutProgress; 0 is no limit. The last"
        " failure: Pod train-r1-0-abcde: KeyError: 'x' (machine node-1, exit code 1)."
    )
    assert plan.events == (Event("Warning", "NoProgress", message),)
    assert world.condition("Failed").message == message
    failure = world.job.status.last_failure
    assert failure is not None
    assert failure.reason == "Exception", "the cause stays, for the logs of its rank"
    assert [(a.number, a.round, a.step) for a in world.job.status.attempts] == [
        (0, 0, 1250),
        (0, None, 1210),
        (1, 0, 1200),
    ]


def test_a_better_cause_that_shows_later_does_not_hide_why_the_job_ended():
    world = running(maxRestarts=100)
    end(world, GANG, 100)
    for _ in range(2):
        end(world, GANG, 90)
    fail(world, message=json.dumps({"reason": "PeerFailed", "message": "connection reset"}))
    world.pass_time(seconds=11)
    world.step()
    assert world.job.status.reason == "NoProgress"
    fail(world, index=1, reason="OOMKilled", exit_code=137)
    world.settle()
    status = world.job.status
    assert status.last_failure is not None
    assert (status.reason, status.last_failure.reason) == ("NoProgress", "OOMKilled")


def test_a_round_that_got_further_is_not_stopped_for_those_before():
    world = running(maxRestarts=100)
    for step in (100, 90, 90):
        end(world, ROUND, step)
    world.restart_in_place(step=90)
    child = world.observed().gang.current_job.metadata.uid
    world.pass_time(seconds=15)
    world.reports.put(("ml", "train"), child, Progress(step=101, time=world.now))
    world.settle()
    assert world.phase == "Running"


def test_the_gang_of_a_job_that_ends_by_its_rounds_stops():
    world = running(maxRestarts=100)
    for step in (100, 90, 90, 90):
        end(world, ROUND, step)
    assert world.phase == "Failed"
    assert not [pod for pod in world.workers() if not pod.metadata.terminating]


@pytest.mark.parametrize(("limit", "failures"), [(1, 2), (2, 3), (0, None)])
def test_the_limit_is_that_of_the_job(limit: int, failures: int | None):
    world = running(maxRestarts=100, maxAttemptsWithoutProgress=limit)
    count = 0
    while world.phase == "Running" and count < 8:
        end(world, GANG, 100)
        count += 1
    assert count == (failures or 8)


def test_the_step_of_a_gang_whose_job_vanished_is_recorded():
    world = running()
    report(world, 70)
    saved_at(world, 60)
    world.delete_child_job()
    world.settle()
    (attempt,) = world.job.status.attempts
    assert (attempt.reason, attempt.step, attempt.checkpoint_step) == ("JobDeleted", 70, 60)


def failed(number: int, step: int | None, saved: int | None) -> Attempt:
    """A failed attempt that reached this step, with the last checkpoint at this step."""
    return Attempt(number=number, step=step, checkpoint_step=saved, counted=True, message="x")


# The steps that each attempt reached, and those of the last checkpoint then.
@pytest.mark.parametrize(
    ("steps", "saved", "why"),
    [
        pytest.param(
            [100, 80, 80, 80],
            [60, 60, 60, 60],
            "with no newer step than 100 and no newer checkpoint than that of step 60",
            id="none is newer",
        ),
        pytest.param([100, 80, 80, 80], [60, 60, 60, 70], "", id="a newer one"),
        pytest.param([100, 80, 80, 80], [None, None, 60, 60], "", id="the first one"),
        pytest.param([100, 80, 80, 80], [60, 30, 30, 40], "step 60", id="back to the start"),
        pytest.param(
            [None, None, None, None],
            [60, 60, 60, 60],
            "with no step and no newer checkpoint than that of step 60",
            id="only checkpoints are reported",
        ),
        pytest.param([None, None, None, None], [60, 60, 60, 61], "", id="only newer ones"),
    ],
)
def test_a_newer_checkpoint_is_progress(steps: list[int | None], saved: list[int | None], why: str):
    ends = tuple(map(failed, range(4), steps, saved))
    found = find_stagnation(TorchrunJobStatus(), ends, 3)
    assert (found is not None) is bool(why)
    assert why in (found.message if found else "")


@pytest.mark.parametrize("how", [GANG, ROUND, LOST, SUSPENDED])
def test_the_last_checkpoint_is_recorded_with_each_end(how: str):
    world = running(maxRestarts=100)
    report(world, 50)
    saved = Checkpoint(step=40, path="/c/last", time=world.now)
    world.reports.put_checkpoints(("ml", "train"), world.job.metadata.uid, (saved,))
    end(world, how, 55)
    assert [attempt.checkpoint_step for attempt in world.job.status.attempts] == [40]


def saved_at(world: World, step: int) -> Checkpoint:
    """A checkpoint of this step is complete now."""
    saved = Checkpoint(step=step, path=f"/c/{step}", time=world.now)
    world.job = replace(world.job, status=replace(world.job.status, last_checkpoint=saved))
    return saved


def remember(world: World, saved: Checkpoint) -> None:
    world.job = replace(world.job, status=replace(world.job.status, last_checkpoint=saved))


def resumed(world: World, saved: Checkpoint, step: int) -> tuple[Event, ...]:
    """The events after rank 0 has reported this step, with this checkpoint in the status."""
    world.pass_time(seconds=15)
    child = world.observed().gang.current_job.metadata.uid
    world.reports.put(("ml", "train"), child, Progress(step=step, time=world.now))
    remember(world, saved)
    return world.step().events


def behind(world: World) -> list[str]:
    return [c.message for c in world.job.status.conditions if c.type == "Resumed"]


@pytest.mark.parametrize("how", [GANG, ROUND, SUSPENDED])
def test_ranks_that_come_back_behind_a_checkpoint_are_reported_once(how: str):
    world = running(nodes=1, maxRestarts=100)
    report(world, 1250)
    saved = saved_at(world, 1200)
    assert resumed(world, saved, 1260) == (), "ranks that saved it are not behind"
    end(world, how, 1260)
    assert not behind(world), "not known before they report"
    (event,) = resumed(world, saved, 3)
    assert (event.type, event.reason) == ("Warning", "ResumedBehind")
    assert event.message == (
        "The ranks resumed at or before step 3, although the checkpoint of step 1200 is complete:"
        " the script has not loaded it. Load the checkpoint that the file of TORCHRUN_RESUME_FILE"
        " names."
    )
    assert behind(world) == [event.message]
    assert resumed(world, saved, 600) == ()
    assert behind(world) == [event.message], "with the step at which they came back"
    assert resumed(world, saved, 1200) == ()
    assert not behind(world), "they have caught up"


@pytest.mark.parametrize("step", [1200, 1201, 1300])
def test_ranks_that_load_their_checkpoint_are_not_behind(step: int):
    world = running(nodes=1, maxRestarts=100)
    report(world, 1250)
    saved = saved_at(world, 1200)
    end(world, GANG, 1260)
    assert resumed(world, saved, step) == ()
    assert not behind(world)


def test_ranks_that_come_back_behind_once_more_are_reported_once_more():
    world = running(nodes=1, maxRestarts=100)
    report(world, 1250)
    saved = saved_at(world, 1200)
    end(world, GANG, 1260)
    assert [event.reason for event in resumed(world, saved, 3)] == ["ResumedBehind"]
    remember(world, saved)
    end(world, GANG, 30)
    remember(world, saved)
    (event,) = resumed(world, saved, 7)
    assert "at or before step 7" in event.message
