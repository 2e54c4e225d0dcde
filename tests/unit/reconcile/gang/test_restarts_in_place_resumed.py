"""Restarts in place of a gang whose child Job a user suspends and resumes.

The template of its pods opens the gate. Kueue's Jobs wait for the controller, see test_restarts_in_place.
"""

from msgspec.structs import replace

from torchrun_api.kinds.meta import Condition, ConditionStatus
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_controller.reconcile import Defaults
from world import World, make_job, make_queue

REPORTING = Defaults(runtime_image="runtime:1", progress_url="http://controller:8081")


def resumed() -> World:
    """A gang of two has restarted twice in place, and a user has suspended and resumed its Job."""
    world = World(make_job(numNodes=2), make_queue())
    world.defaults = REPORTING
    world.settle()
    assert not any(apply.kind is PODS for plan in world.plans for apply in plan.applies)
    world.all_workers("Running")
    world.settle()
    for number in (0, 2):  # after newer code
        world.restart_in_place(round=number)
    world.settle()
    set_suspended(world, True)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Preempted", "JobSuspended")
    world.resume_child("train")
    set_suspended(world, False)
    return world


def set_suspended(world: World, suspended: bool) -> None:
    """The Job controller has suspended or resumed the child Job."""
    child = world.objects[JOBS.plural, "train"]
    status: ConditionStatus = "True" if suspended else "False"
    condition = Condition(type="Suspended", status=status, last_transition_time=world.now)
    world.objects[JOBS.plural, "train"] = replace(
        child,
        spec=replace(child.spec, suspend=suspended),
        status=replace(child.status, conditions=(condition,)),
    )


def test_the_pods_of_a_resumed_job_continue_the_count():
    world = resumed()
    world.settle_twice()
    leader, follower = (pod.metadata.annotations for pod in world.workers())
    assert (leader.start, leader.restarts_in_place) == ("0", "2 3")
    assert (follower.start, follower.restarts_in_place) == ("0", "")
    world.all_workers("Running")
    world.settle_twice()
    world.restart_in_place(round=3)
    plan = world.step()
    assert not plan.applies
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_in_place) == (0, 3, 3)
    assert [end.round for end in status.attempts] == [0, 2, 3]


def test_the_new_leader_gets_the_count_while_earlier_pods_still_end():
    world = resumed()
    child = world.objects[JOBS.plural, "train"]
    del world.objects[PODS.plural, "train-1-abcde"]
    world._spawn_pod(child, 1, "earlier")
    world.pod("train-1-earlier", phase="Running")
    world._released((PODS.plural, "train-1-earlier"))
    world.pass_time(seconds=1)
    set_suspended(world, False)
    world.settle()
    assert world.workers()[0].metadata.annotations.restarts_in_place == "2 3"


def test_a_restart_before_the_pod_is_seen_to_run_is_its_own():
    world = resumed()
    world.settle_twice()
    world.restart_in_place(round=3)
    plan = world.step()
    assert world.job.status.restarts == 3
    assert not plan.applies


def test_so_is_one_of_the_first_pods():
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.restart_in_place()
    plan = world.step()
    assert world.job.status.restarts == 1
    assert not plan.applies


def test_a_launcher_that_has_passed_its_gate_gets_no_count():
    """It reads the annotation once."""
    world = resumed()
    world.all_workers("Running")
    world.settle()
    assert world.workers()[0].metadata.annotations.restarts_in_place == ""
