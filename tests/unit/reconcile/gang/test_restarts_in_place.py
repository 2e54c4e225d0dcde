"""Restarts in the same pods count once, with their cause, and are limited like new gangs."""

import json
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from torchrun_api.contract import launch
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import JOBS
from torchrun_api.kinds.status import MOST_GANGS
from torchrun_controller.cache.progress_reports import Reports
from torchrun_controller.reconcile import Defaults, reconcile
from torchrun_controller.reconcile.model.observed import Installed, RestartsInPlace
from torchrun_controller.reconcile.schedulers.kueue import KUEUE_WORKLOADS
from unit.reconcile.failing import disrupt, fail, running
from world import START, World, make_job, make_queue

REPORTING = Defaults(runtime_image="runtime:1", progress_url="http://controller:8081")


def limits(**reliability: object) -> JsonObject | None:
    """The limits that the pods of the first gang get."""
    world = World(make_job(numNodes=2, reliability=reliability), make_queue())
    return limits_of_next_gang(world, REPORTING)


def limits_of_next_gang(world: World, defaults: Defaults) -> JsonObject | None:
    applies = reconcile(world.observed(), world.now, defaults).applies
    child = next(apply for apply in applies if apply.kind is JOBS)
    environment = child.body["spec"]["template"]["spec"]["containers"][0]["env"]  # type: ignore[index, call-overload]
    name = launch.IN_PLACE_RESTARTS.name
    values = [variable["value"] for variable in environment if variable["name"] == name]  # type: ignore[index, union-attr, call-overload]
    return json.loads(str(values[0])) if values else None


def message_of(restarts: int) -> str:
    """The termination message of a pod whose gang restarted this often in place."""
    return json.dumps({"exitCode": 1, "reason": "Exception", "restartsInPlace": restarts})


def test_a_restart_in_place_is_recorded_with_its_cause():
    world = running()
    world.pass_time(seconds=30)
    world.restart_in_place(node=1)
    plan = world.step()
    status = world.job.status
    assert (world.phase, status.attempt, status.restarts) == ("Running", 0, 1)
    assert status.restarts_in_place == 1
    assert not plan.applies
    assert not plan.deletes
    (end,) = status.attempts
    assert (end.number, end.round, end.counted, end.reason) == (0, 0, True, "Exception")
    assert end.running_seconds == 20
    assert (end.start_time, end.end_time) == (START + timedelta(seconds=10), world.now)
    failure = status.last_failure
    assert failure is not None
    assert (failure.node, failure.rank, failure.exit_code) == ("node-1", 1, 1)
    assert failure.message == "Pod train-1-abcde: KeyError: 'x'"
    assert status.message == (
        "2 of 2 pods are running. 1 restart in the same pods. The last failure: Pod train-1-abcde:"
        " KeyError: 'x'."
    )
    (event,) = plan.events
    assert (event.type, event.reason) == ("Warning", "RestartedInPlace")
    assert event.message == (
        "Round 0 of attempt 0 failed. The ranks start again in the same pods. Pod train-1-abcde:"
        " KeyError: 'x'."
    )


def test_a_repeated_report_counts_once():
    world = running()
    world.restart_in_place()
    world.settle()
    world.reports = Reports()  # the controller restarts
    world.settle()
    assert world.job.status.restarts_in_place == 1
    world.restart_in_place()
    world.settle()
    world.settle()
    status = world.job.status
    assert (status.restarts, status.restarts_in_place) == (2, 2)
    assert [end.round for end in status.attempts] == [0, 1]


def test_restarts_without_a_description_count():
    world = running()
    for _ in range(5):
        world.restart_in_place(lost=True)
    world.restart_in_place()
    world.settle()
    assert world.job.status.restarts == 6
    assert [end.round for end in world.job.status.attempts] == [3, 4, 5]


def test_the_next_gang_has_its_own_count():
    world = running()
    world.restart_in_place()
    world.settle()
    fail(world)
    world.settle()
    world.pass_time(seconds=10)
    world.settle()
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_in_place) == (1, 2, 0)
    assert [(end.number, end.round) for end in status.attempts] == [(0, 0), (0, None)]
    world.containers_stop()
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.restart_in_place(message="ValueError: later")
    world.settle_twice()
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_in_place) == (1, 3, 1)
    assert status.last_failure.message == "Pod train-r1-0-abcde: ValueError: later"


def test_the_message_of_a_failed_pod_has_restarts_that_no_report_brought():
    world = running(maxRestarts=3)
    world.restart_in_place()
    world.settle()
    fail(world, message=message_of(restarts=3))
    world.settle()
    status = world.job.status
    assert (world.phase, status.restarts, status.restarts_in_place) == ("Failed", 3, 3)
    assert status.message.endswith("All restarts are used (maxRestarts is 3).")


def test_the_message_of_any_pod_has_the_restarts():
    """The pod of node 0 may end a moment later than another one."""
    world = running(maxRestarts=9)
    fail(world, 1, message=message_of(restarts=3))
    world.step()
    assert world.job.status.restarts == 4


def test_a_success_keeps_the_restarts_in_place():
    world = running()
    world.restart_in_place()
    world.settle()
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    status = world.job.status
    assert (world.phase, status.restarts) == ("Succeeded", 1)
    assert [(end.number, end.round) for end in status.attempts] == [(0, 0)]


def test_a_report_and_the_end_of_the_gang_are_recorded_together():
    world = running()
    world.restart_in_place()
    fail(world)
    world.step()
    status = world.job.status
    assert (status.reason, status.restarts) == ("BackingOff", 2), "the round counts for the delay"
    assert [(end.number, end.round) for end in status.attempts] == [(0, 0), (0, None)]


def test_a_suspension_keeps_the_count():
    world = running()
    world.restart_in_place()
    world.suspend()
    world.resume()
    status = world.job.status
    assert (status.restarts, status.disruptions) == (1, 0)


def test_a_suspension_counts_once_while_the_job_ends_slowly():
    world = running()
    world.restart_in_place()
    world.settle()
    world.restart_in_place()  # reported together with the suspension
    world.spec(suspend=True)
    for _ in range(4):
        plan = world.plan()
        if plan.status is not None:
            world.write_status(plan.status)  # the Job is not deleted yet
    status = world.job.status
    assert (status.restarts, status.restarts_in_place) == (2, 2)
    assert [(end.round, end.reason) for end in status.attempts] == [
        (0, "Exception"),
        (1, "Exception"),
        (None, "Suspended"),
    ]


def test_a_report_describes_two_restarts_and_the_message_has_three():
    world = running(maxRestarts=9)
    world.restart_in_place()
    world.restart_in_place()
    fail(world, message=message_of(restarts=3))
    world.settle()
    assert world.job.status.restarts == 4
    assert [end.round for end in world.job.status.attempts] == [0, 1, None]


def test_an_absurd_number_of_restarts_leaves_the_status_valid():
    world = running()
    fail(world, message=message_of(restarts=2_000_000))
    world.settle()
    assert world.job.status.restarts_in_place == MOST_GANGS


def test_a_disruption_after_restarts_in_place_counts_apart():
    world = running(maxRestarts=1)
    world.restart_in_place()
    world.settle()
    disrupt(world)
    world.step()
    status = world.job.status
    assert (world.phase, status.restarts, status.disruptions) == ("Queued", 1, 1)


def test_failed_rounds_delay_the_next_gang():
    world = running()
    for _ in range(2):
        world.restart_in_place()
        world.settle()
    fail(world)
    world.step()
    assert world.job.status.reason == "BackingOff"
    assert "starts 20 s after the end of attempt 0" in world.job.status.message


def test_a_round_that_lasted_resets_the_delay():
    world = running()
    world.restart_in_place()
    world.restart_in_place(seconds=600.0)
    world.settle()
    fail(world)
    world.settle()
    assert world.job.status.attempt == 1


def test_a_lost_status_write_loses_no_restart():
    world = running()
    world.restart_in_place()
    fail(world)
    world.step(writes=0)
    world.settle()
    world.pass_time(seconds=10)
    world.step(writes=1)
    world.settle()
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_in_place) == (1, 2, 0)


def test_nodes_that_failed_in_two_rounds_are_avoided():
    world = running()
    for _ in range(2):
        world.restart_in_place(reason="Signaled", signal=9, exit_code=137)
    world.settle()
    assert world.job.status.avoided_nodes == ("node-1",)


def test_a_report_of_an_earlier_gang_counts_nothing():
    world = running()
    old = world.observed().gang.current_job.metadata.uid
    fail(world)
    world.settle()
    world.reports.put_restarts(("ml", "train"), old, RestartsInPlace(count=2))
    world.settle()
    assert world.job.status.restarts == 1


def test_any_time_of_a_report_is_accepted():
    world = running()
    for time in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), None):
        world.restart_in_place(time=time, seconds=1e9, message="x" * 5000)
    world.settle()
    status = world.job.status
    assert status.restarts == 3
    assert status.attempts[0].start_time is None
    assert status.attempts[1].end_time == world.now, "no time in the future"
    assert status.last_failure is not None
    assert len(status.last_failure.message) == 1024


def test_the_launchers_get_the_limits():
    assert limits() == {"restarts": 3, "exitCodes": [], "signals": []}
    rules = [
        {"exitCodes": [42, 7], "action": "fail"},
        {"signals": [9], "exitCodes": [3], "action": "ignore"},
        {"podConditions": ["DisruptionTarget"], "action": "restart"},
    ]
    assert limits(maxRestarts=5, rules=rules) == {
        "restarts": 5,
        "exitCodes": [3, 7, 42],
        "signals": [9],
    }


def test_without_restarts_in_place_the_launchers_get_no_limits():
    assert limits(restartScope="Gang") is None
    assert limits(maxRestarts=0) is None
    assert limits(restartPolicy="Never") is None
    world = World(make_job(numNodes=2), make_queue())
    # Nobody would count the restarts.
    assert limits_of_next_gang(world, replace(REPORTING, progress_url="")) is None


def test_the_queue_sets_the_scope_and_the_job_overrides_it():
    queue = make_queue(reliability={"restartScope": "Gang"})
    assert limits_of_next_gang(World(make_job(numNodes=2), queue), REPORTING) is None
    job = make_job(numNodes=2, reliability={"restartScope": "InPlace"})
    assert limits_of_next_gang(World(job, queue), REPORTING) is not None


def test_the_next_gang_gets_what_is_left():
    world = running(maxRestarts=3)
    world.restart_in_place()
    world.settle()
    fail(world)
    world.pass_backoff()
    assert limits_of_next_gang(world, REPORTING) == {"restarts": 1, "exitCodes": [], "signals": []}


def kueue_resumes(world: World) -> None:
    """Kueue admits the child Job again."""
    world.resume_child("train")
    world.settle()
    world.all_workers("Running")
    world.settle()


def test_the_pods_of_a_resumed_job_continue_the_count():
    world = World(make_job(numNodes=2), make_queue(scheduling={"gang": "kueue"}))
    world.defaults = REPORTING
    kueue = KUEUE_WORKLOADS[0]
    world.installed = Installed(resources=frozenset({(kueue.api_version, kueue.plural)}))
    world.settle()
    kueue_resumes(world)
    leader = world.workers()[0].metadata.annotations
    assert (leader.start, leader.restarts_in_place) == ("0", "")
    world.restart_in_place(round=0)
    world.restart_in_place(round=2)  # after newer code
    world.settle()
    kueue_resumes(world)
    leader, follower = (pod.metadata.annotations for pod in world.workers())
    assert (leader.start, leader.restarts_in_place) == ("0", "2 3")
    assert (follower.start, follower.restarts_in_place) == ("", "")
    world.restart_in_place(round=3)
    world.settle()
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_in_place) == (0, 3, 3)
    assert [end.round for end in status.attempts] == [0, 2, 3]
