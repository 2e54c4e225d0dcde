"""Progress in the status, and hangs as failures."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec
import pytest
from msgspec.structs import replace

from torchrun_api.kinds.status import Progress
from torchrun_controller.reconcile import Defaults, Plan, StatusWrite, reconcile
from torchrun_controller.reconcile.model.observed import FailedRound, RestartsInPlace
from world import World, make_job, make_queue

REPORTING = Defaults(runtime_image="runtime:1", progress_url="http://controller:8081")


def running(nodes: int = 2, **reliability: object) -> World:
    world = World(make_job(numNodes=nodes, reliability=reliability), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def report(step: int, time: datetime) -> Progress:
    return Progress(step=step, total_steps=100, loss=2.5, time=time)


def report_progress(world: World, progress: Progress) -> Plan:
    """Reconcile with this report, and store the status as the API server would."""
    observed = world.observed()
    observed = replace(observed, gang=replace(observed.gang, progress=progress))
    plan = reconcile(observed, world.now, REPORTING)
    if plan.status is not None:
        wire = msgspec.json.decode(msgspec.json.encode(plan.status), type=type(plan.status))
        world.job = replace(world.job, status=wire)
    return plan


def test_the_first_report_is_shown_at_once():
    world = running()
    progress = report(1, world.now)
    report_progress(world, progress)
    assert world.job.status.progress == progress
    assert report_progress(world, progress) == Plan(writes=(StatusWrite(),))


def test_reports_cost_one_status_write_in_ten_seconds():
    world = running()
    report_progress(world, report(1, world.now))
    writes = 0
    for step in range(2, 62):
        world.pass_time(seconds=1)
        writes += report_progress(world, report(step, world.now)).status is not None
    assert writes == 6
    assert world.job.status.progress is not None
    assert world.job.status.progress.step == 61


def test_a_report_within_ten_seconds_is_shown_later():
    world = running()
    report_progress(world, report(1, world.now))
    world.pass_time(seconds=4)
    late = report(5, world.now)
    plan = report_progress(world, late)
    assert (plan.status, plan.requeue_after) == (None, 6)
    world.pass_time(seconds=6)
    report_progress(world, late)
    assert world.job.status.progress == replace(late, steps_per_second=1.0)


def shown(world: World, progress: Progress) -> Progress:
    """The progress in the status after this report."""
    report_progress(world, progress)
    assert world.job.status.progress is not None
    return world.job.status.progress


@pytest.mark.parametrize(
    ("reported", "rounded"),
    [
        (2.6052303314208984, 2.605),
        (660.4361669048162, 660.4),
        (0.00012345678, 0.0001235),
        (1234567.0, 1235000.0),
        (1.7976931348623157e308, 1.7976931348623157e308),
        (0.0, 0.0),
    ],
)
def test_printed_numbers_are_rounded_and_steps_are_exact(reported: float, rounded: float):
    world = running()
    progress = Progress(
        step=123456789,
        total_steps=987654321,
        loss=reported,
        samples_per_second=reported,
        time=world.now,
    )
    expected = replace(progress, loss=rounded, samples_per_second=rounded)
    assert shown(world, progress) == expected
    assert report_progress(world, progress) == Plan(writes=(StatusWrite(),))


def test_the_rate_is_an_average_of_the_last_minute():
    world = running()
    assert shown(world, report(1, world.now)).steps_per_second is None
    world.pass_time(seconds=10)
    assert shown(world, report(21, world.now)).steps_per_second == 2.0
    world.pass_time(seconds=10)
    faster = shown(world, report(61, world.now)).steps_per_second
    assert faster == 2.307, "2 + (4 - 2) * (1 - exp(-10 / 60))"
    world.pass_time(seconds=600)
    assert shown(world, report(661, world.now)).steps_per_second == 1.0


@pytest.mark.parametrize("field", ["step", "time"])
def test_a_report_without_step_or_time_has_no_rate(field: str):
    world = running()
    complete = report(1, world.now)
    report_progress(world, replace(complete, **{field: None}))
    world.pass_time(seconds=10)
    assert shown(world, report(11, world.now)).steps_per_second is None
    world.pass_time(seconds=10)
    assert shown(world, report(21, world.now)).steps_per_second == 1.0
    world.pass_time(seconds=10)
    last = replace(report(31, world.now), **{field: None})
    assert shown(world, last).steps_per_second is None


@pytest.mark.parametrize(("step", "seconds"), [(40, 10), (60, -10)])
def test_the_rate_starts_again_if_steps_or_clock_go_back(step: int, seconds: int):
    world = running()
    report_progress(world, report(50, world.now))
    world.pass_time(seconds=10)
    assert shown(world, report(51, world.now)).steps_per_second == 0.1
    later = world.now + timedelta(seconds=seconds)
    world.pass_time(seconds=10)
    assert shown(world, report(step, later)).steps_per_second is None


def test_the_rate_is_that_of_the_current_gang():
    world = running(nodes=1)
    report_progress(world, report(50, world.now))
    world.pass_time(seconds=10)
    world.end_container(world.workers()[0].metadata.name, "trainer", exit_code=1)
    world.settle()
    world.pass_time(seconds=20)
    world.all_workers("Running")
    world.settle()
    world.pass_time(seconds=20)
    assert shown(world, report(52, world.now)).steps_per_second is None
    world.pass_time(seconds=10)
    assert shown(world, report(57, world.now)).steps_per_second == 0.5


def remaining(world: World, step: int, total: int | None = 100) -> int | None:
    """The estimate in the status, ten seconds later and with this report."""
    world.pass_time(seconds=10)
    report_progress(world, replace(report(step, world.now), total_steps=total))
    return world.job.status.estimated_remaining_seconds


@pytest.mark.parametrize(
    ("steps", "total", "expected"),
    [
        pytest.param((1,), 100, None, id="no rate yet"),
        pytest.param((1, 21), 100, 40, id="79 steps, 2 a second"),
        pytest.param((1, 8), 100, 131, id="92 steps, 0.7 a second"),
        pytest.param((1, 100), 100, 0, id="the last step"),
        pytest.param((1, 120), 100, 0, id="more steps than announced"),
        pytest.param((1, 21), None, None, id="no total"),
        pytest.param((1, 21), 0, None, id="a total of 0"),
        pytest.param((1, 1), 100, None, id="no progress"),
        pytest.param((1, 2), 2**53, 2**31 - 1, id="longer than the field"),
    ],
)
def test_the_time_left_is_by_the_rate(
    steps: tuple[int, ...], total: int | None, expected: int | None
):
    world = running()
    assert [remaining(world, step, total) for step in steps][-1] == expected


def test_the_time_left_causes_no_write_of_the_status():
    world = running()
    remaining(world, 1)
    assert remaining(world, 21) == 40
    last = report(21, world.now)
    for _ in range(60):
        world.pass_time(seconds=1)
        assert report_progress(world, last).status is None
    assert world.job.status.estimated_remaining_seconds == 40


def _new_gang(world: World) -> None:
    world.end_container(world.workers()[0].metadata.name, "trainer", exit_code=1)
    world.settle()
    assert world.job.status.attempt == 1
    assert world.job.status.estimated_remaining_seconds is None, "no gang runs"
    world.pass_time(seconds=20)
    world.all_workers("Running")
    world.settle()


def _new_round(world: World) -> None:
    world.restart_in_place()
    world.settle()


def _suspension(world: World) -> None:
    world.suspend()
    assert world.job.status.estimated_remaining_seconds is None, "nothing runs"
    world.resume()
    world.all_workers("Running")
    world.settle()


@pytest.mark.parametrize("interrupt", [_new_gang, _new_round, _suspension])
@pytest.mark.parametrize("resumed_at", [0, 21, 40])
def test_the_time_left_is_unknown_until_the_new_ranks_have_a_rate(
    interrupt: Callable[[World], None], resumed_at: int
):
    world = running(nodes=1)
    remaining(world, 1)
    assert remaining(world, 21) == 40
    world.pass_time(seconds=10)
    interrupt(world)
    assert world.phase == "Running"
    assert world.job.status.estimated_remaining_seconds is None, "only the old ranks have reported"
    assert remaining(world, resumed_at) is None, "no rate yet"
    assert remaining(world, resumed_at + 10) == 90 - resumed_at, "at the rate of the new ranks"


def test_the_time_left_is_unknown_while_the_pods_wait_for_an_edit():
    world = running(nodes=1)
    remaining(world, 1)
    assert remaining(world, 21) == 40
    child = world.observed().gang.current_job.metadata.uid
    failed = FailedRound(reason="Exception", message="KeyError: 'x'", exit_code=1)
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace(awaits_edit=failed))
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Running", "AwaitingEdit")
    assert world.job.status.estimated_remaining_seconds is None


def test_a_finished_job_has_no_time_left():
    world = running(nodes=1)
    remaining(world, 1)
    assert remaining(world, 21) == 40
    world.job_condition("Complete")
    report_progress(world, report(99, world.now))
    assert (world.phase, world.job.status.estimated_remaining_seconds) == ("Succeeded", None)


def test_a_clock_that_is_set_back_delays_no_report():
    world = running()
    report_progress(world, report(1, world.now + timedelta(hours=1)))
    report_progress(world, report(2, world.now))
    assert world.job.status.progress is not None
    assert world.job.status.progress.step == 2


def test_the_end_shows_the_last_report():
    world = running(nodes=1)
    report_progress(world, report(99, world.now))
    world.pass_time(seconds=1)
    world.job_condition("Complete")
    report_progress(world, report(100, world.now))
    assert world.phase == "Succeeded"
    assert world.job.status.progress is not None
    assert world.job.status.progress.step == 100


def test_ranks_that_stop_at_the_deadline_report_until_they_end():
    world = running(nodes=1, activeDeadlineSeconds=100)
    world.pass_time(seconds=100)
    report_progress(world, report(50, world.now))
    assert world.phase == "TimedOut"
    world.pass_time(seconds=1)
    report_progress(world, report(51, world.now))
    assert world.job.status.progress is not None
    assert world.job.status.progress.step == 51


def test_progress_outlives_its_gang():
    world = running(nodes=1)
    report_progress(world, report(50, world.now))
    world.end_container(world.workers()[0].metadata.name, "trainer", exit_code=1)
    world.settle()
    assert world.job.status.attempt == 1
    assert world.job.status.progress is not None
    assert world.job.status.progress.step == 50


def test_workers_report_only_with_a_progress_endpoint():
    world = World(make_job(numNodes=1), make_queue())
    silent = json.dumps(msgspec.to_builtins(world.plan().applies[-1].body))
    plan = reconcile(world.observed(), world.now, REPORTING)
    pod = plan.applies[-1].body["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    assert {"name": "TORCHRUN_PROGRESS_URL", "value": REPORTING.progress_url} in trainer["env"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "progress-token")
    (source,) = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "torchrun.ai/progress"
    assert "PROGRESS" not in silent
    assert "progress" not in silent


@pytest.mark.parametrize(("mine", "queues", "value"), [(60, 30, "60"), (None, 30, "30")])
def test_the_hang_timeout_reaches_the_launcher(mine: int | None, queues: int, value: str):
    reliability = {} if mine is None else {"hangTimeoutSeconds": mine}
    job = make_job(numNodes=1, reliability=reliability)
    world = World(job, make_queue(reliability={"hangTimeoutSeconds": queues}))
    (trainer,) = world.plan().applies[-1].body["spec"]["template"]["spec"]["containers"]
    assert {"name": "TORCHRUN_HANG_TIMEOUT_SECONDS", "value": value} in trainer["env"]


def end(world: World, index: int, seconds: float, **verdict: object) -> None:
    time = (world.now + timedelta(seconds=seconds)).isoformat()
    message = json.dumps({"message": "…", "time": time, **verdict})
    code = verdict["exitCode"]
    world.end_container(
        world.workers()[index].metadata.name, "trainer", exit_code=code, message=message
    )


@pytest.mark.parametrize(
    "collateral",
    [
        {"exitCode": 1, "reason": "Exception", "rank": 1},
        {"exitCode": 134, "signal": 6, "reason": "Signaled", "rank": 1},
        {"exitCode": 143, "signal": 15, "reason": "Stopped"},
    ],
    ids=["exception", "abort", "stopped"],
)
def test_a_hang_is_the_cause_of_failures_that_follow_it(collateral: dict[str, object]):
    world = running()
    end(world, 0, 0, **collateral)
    end(world, 1, 1, exitCode=124, reason="Hung")
    world.settle()
    status = world.job.status
    assert status.last_failure is not None
    assert (status.last_failure.reason, status.last_failure.exit_code) == ("Hung", 124)
    assert (status.attempt, status.restarts, status.disruptions) == (1, 1, 0)
    assert status.attempts[0].reason == "Hung"


def test_an_oom_kill_is_the_cause_of_a_later_hang():
    world = running(maxRestarts=0)
    end(world, 0, 0, exitCode=137, signal=9, reason="OOMKilled")
    end(world, 1, 1, exitCode=124, reason="Hung")
    world.settle()
    assert world.job.status.reason == "OOMKilled"


def test_rules_match_a_hang_by_its_exit_code():
    world = running(rules=[{"exitCodes": [124], "action": "fail"}])
    end(world, 0, 0, exitCode=124, reason="Hung")
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "Hung")
