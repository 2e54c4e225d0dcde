"""A job of a queue with admission: it waits for its turn, keeps it, and gives way to another."""

import pytest

from admitting import QUOTA, running, submitted
from torchrun_api.kinds import JOBS, PODS
from world import ZIP, World, make_job, make_queue


@pytest.mark.parametrize("takes_part", [{"quota": {}}, {"weight": 1}, {"cohort": "lab"}])
def test_no_gang_before_its_admission(takes_part):
    world = submitted(takes_part)
    assert (world.phase, world.job.status.reason) == ("Queued", "WaitingForAdmission")
    assert "TorchrunQueue gpu" in world.job.status.message
    assert world.gangs == []
    world.admission(False, "QuotaUsed", "2nd in gpu: needs 2 nodes, 1 is free", None)
    world.settle()
    assert world.job.status.message == "2nd in gpu: needs 2 nodes, 1 is free"
    assert world.condition("Running").message == "2nd in gpu: needs 2 nodes, 1 is free"
    world.admit(2)
    world.settle()
    assert len(world.gangs) == 1


def test_a_queue_without_any_of_these_admits_at_once():
    world = submitted({"priority": 5, "limits": {"maxNodesPerJob": 2}})
    assert len(world.gangs) == 1


def test_the_workspace_is_made_while_the_job_waits():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue(**QUOTA))
    world.settle()
    assert world.phase == "Syncing"
    world.sync_done()
    world.claim_is("Bound")
    world.settle()
    assert world.job.status.reason == "WaitingForAdmission"
    assert world.condition("WorkspaceReady").status == "True"


def test_what_the_coordinator_says_is_never_claimed_nor_lost():
    world = running()
    written = [plan.status for plan in world.plans if plan.status is not None]
    for status in written:
        assert status.admission is None
        assert status.queue_position is None
        assert "Admitted" not in {c.type for c in status.conditions}
    assert world.condition("Admitted").status == "True"
    world.job_condition("Complete")
    world.settle()
    world.admission(False, "Finished", "gave it back", None)
    assert world.plan().status is None, "nothing is written because another has written"


def test_a_restart_keeps_the_admission():
    world = running()
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.settle()
    assert len(world.gangs) == 2
    assert world.job.status.restarts == 1


def test_a_larger_gang_needs_a_larger_admission():
    world = running(elastic={"minNodes": 1, "maxNodes": 4})
    world.spec(num_nodes=4)
    world.settle()
    assert len(world.gangs) == 1
    assert world.phase == "Running", "the present gang goes on"
    assert "no resize to 4 nodes yet: 4 nodes are asked for" in world.job.status.message
    world.admit(4)
    world.settle()
    assert [gang.spec.completions for gang in world.gangs] == [2, 4]


def test_a_smaller_gang_needs_no_admission():
    world = running(elastic={"minNodes": 1, "maxNodes": 4})
    world.spec(num_nodes=1)
    world.settle()
    assert [gang.spec.completions for gang in world.gangs] == [2, 1]


class TestPreemption:
    def test_the_gang_ends_with_its_grace_period_and_the_job_waits_again(self):
        world = running()
        world.preempt(by="ml/urgent")
        plan = world.step()
        assert [(d.kind, d.grace_seconds) for d in plan.deletes] == [(JOBS, None)]
        assert [e.reason for e in plan.events] == ["Preempting"]
        assert (world.phase, world.job.status.reason) == ("Preempted", "Preempting")
        assert "gives way to ml/urgent" in world.job.status.message
        (attempt,) = world.job.status.attempts
        assert (attempt.reason, attempt.counted) == ("Preempted", False)
        world.settle()
        assert "2 pods still end" in world.job.status.message
        world.containers_stop()
        world.settle()
        assert (world.phase, world.job.status.reason) == ("Preempted", "Preempted")
        assert world.gangs[1:] == []

    def test_it_goes_on_once_it_is_admitted_again(self):
        world = running()
        world.preempt()
        world.settle()
        world.containers_stop()
        world.settle()
        world.admission(False, "QuotaUsed", "1st in gpu", None)
        world.settle()
        status = world.job.status
        assert (world.phase, status.reason, status.message) == (
            "Preempted",
            "WaitingForAdmission",
            "1st in gpu",
        )
        world.admit(2)
        world.settle()
        world.all_workers("Running")
        world.settle()
        status = world.job.status
        assert (world.phase, status.attempt, status.restarts, status.disruptions) == (
            "Running",
            1,
            0,
            0,
        )

    def test_a_right_that_was_not_used_is_taken_back_too(self):
        """The status says so before the charge is taken away: then no gang is under way."""
        world = submitted()
        world.admit(2)
        world.preempt()
        world.settle()
        assert (world.phase, world.job.status.reason) == ("Preempted", "Preempted")
        assert world.gangs == []
        assert world.job.status.attempts == ()

    def test_a_gang_that_the_status_does_not_know_is_noted_first(self):
        world = submitted()
        world.admit(2)
        world.step(writes=9)
        assert len(world.gangs) == 1
        world.preempt()
        plan = world.step()
        assert plan.deletes == ()
        world.settle()
        world.containers_stop()
        world.settle()
        assert [a.reason for a in world.job.status.attempts] == ["Preempted"]

    def test_who_fails_meanwhile_is_not_restarted(self):
        world = running()
        world.preempt()
        world.pod(world.workers()[0].metadata.name, phase="Failed")
        world.settle()
        assert (world.phase, world.job.status.restarts) == ("Preempted", 0)

    def test_a_pause_goes_before_and_success_before_both(self):
        world = running()
        world.preempt()
        world.spec(suspend=True)
        world.settle()
        assert world.job.status.reason == "Suspending"
        world = running()
        world.preempt()
        world.job_condition("Complete")
        world.settle()
        assert world.phase == "Succeeded"

    def test_a_restart_after_it_is_not_delayed(self):
        world = running()
        world.preempt()
        world.settle()
        world.containers_stop()
        world.settle()
        world.admit(2)
        world.settle()
        world.pod(world.workers()[0].metadata.name, phase="Failed")
        world.settle()
        assert len(world.gangs) == 3

    def test_pods_on_lost_nodes_are_remembered_and_not_waited_for(self):
        world = running()
        world.node("node-1")
        world.node("node-2")
        first = world.workers()[0].metadata.name
        world.place(first, "node-2")
        world.node("node-2", False)
        world.preempt()
        world.settle()
        world.containers_stop()
        assert (PODS.plural, first) in world.objects
        world.pass_time(seconds=400)
        world.settle()
        assert world.job.status.reason == "Preempted"
        assert [u.node for u in world.job.status.unfenced] == ["node-2"]
