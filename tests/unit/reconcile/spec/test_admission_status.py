"""A job of a queue with admission: it waits for admission, keeps it, and is preempted."""

import pytest
from msgspec.structs import replace

from admitting import QUOTA, running, submitted
from queue_lab import pods_of
from torchrun_api.kinds.admission import Admission
from torchrun_api.kinds.job import Head, JobNodeResources
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_api.kinds.shared import PodTemplate
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.spec import admission_status
from world import ZIP, World, make_job, make_queue


@pytest.mark.parametrize("takes_part", [{"quota": {}}, {"weight": 1}, {"cohort": "lab"}])
def test_no_gang_before_its_admission(takes_part):
    world = submitted(takes_part)
    assert (world.phase, world.job.status.reason) == ("Queued", "WaitingForAdmission")
    assert "TorchrunQueue gpu" in world.job.status.message
    assert world.gangs == []
    world.admission(False, "InsufficientQuota", "2nd in gpu: needs 2 nodes, 1 is free", None)
    world.settle()
    assert world.job.status.message == "2nd in gpu: needs 2 nodes, 1 is free"
    running, requested = world.condition("Running"), world.condition("AdmissionRequested")
    assert running.message == "The job is not admitted. See the condition Admitted."
    assert requested.message == "The job requests admission. See the condition Admitted."
    world.admit(2)
    world.settle()
    assert len(world.gangs) == 1


def test_a_queue_without_any_of_these_admits_at_once():
    world = submitted({"priority": 5, "limits": {"maxNodesPerJob": 2}})
    assert len(world.gangs) == 1


def test_the_workspace_is_prepared_while_the_job_waits():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue(**QUOTA))
    world.settle()
    assert world.phase == "Syncing"
    world.sync_done()
    world.claim_is("Bound")
    world.settle()
    assert world.job.status.reason == "WaitingForAdmission"
    assert world.condition("WorkspaceReady").status == "True"


def test_conditions_of_the_coordinator_are_neither_owned_nor_lost():
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
    assert world.plan().status is None, "a write of the coordinator causes no status update"


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
    assert world.phase == "Running", "the current gang continues"
    assert world.job.status.message == (
        "The gang has 2 of 4 nodes. Waiting for the queue to admit more. See the condition"
        " Admitted."
    )
    world.admit(4)
    world.settle()
    assert [gang.spec.completions for gang in world.gangs] == [2, 4]


def test_a_smaller_gang_needs_no_admission():
    world = running(elastic={"minNodes": 1, "maxNodes": 4})
    world.spec(num_nodes=1)
    world.settle()
    assert [gang.spec.completions for gang in world.gangs] == [2, 1]


GPU = "nvidia.com/gpu"
GPUS = {"quota": {"gpus": 0}, "nodeResources": {"gpus": 8, "cpus": 96, "memory": "512Gi"}}


class TestOtherRequests:
    """Requests of job and queue can change at any time. The admission does not change."""

    def edited(self, **node: object) -> World:
        """A gang without GPUs has ended, and the next one has other requests."""
        world = running(GPUS, nodeResources={"gpus": 0, "cpus": 4, "memory": "8Gi"})
        world.spec(node_resources=JobNodeResources(**node))
        world.settle()
        assert world.phase == "Running", "a running gang keeps its resources"
        world.delete_child_job()
        world.settle()
        return world

    @pytest.mark.parametrize(
        ("node", "message"),
        [
            ({"gpus": 8}, "8 GPUs on each node, but was admitted with 0."),
            (
                {"gpus": 0, "cpus": "4500m", "memory": "8Gi"},
                "4500m of cpu on each node, but was admitted with 4.",
            ),
            (
                {"gpus": 0, "cpus": 4, "memory": "9Gi"},
                "9Gi of memory on each node, but was admitted with 8Gi.",
            ),
        ],
    )
    def test_a_gang_with_larger_requests_needs_a_new_admission(self, node, message):
        world = self.edited(**node)
        assert len(world.gangs) == 1
        assert (world.phase, world.job.status.reason) == ("Queued", "WaitingForAdmission")
        assert message in world.job.status.message

    def test_a_gang_with_smaller_requests_needs_no_new_admission(self):
        world = self.edited(gpus=0, cpus=1, memory="1Gi")
        assert len(world.gangs) == 2

    def test_a_gang_on_larger_nodes_of_its_queue_needs_a_new_admission(self):
        world = running({"quota": {"nodes": 2}, "nodeResources": {"gpus": 4}})
        world.queue = make_queue(quota={"nodes": 2}, nodeResources={"gpus": 8})
        world.pod(world.workers()[0].metadata.name, phase="Failed")
        world.settle()
        assert len(world.gangs) == 1
        assert "8 GPUs on each node, but was admitted with 4." in world.job.status.message

    def test_an_admission_holds_in_its_queue_only(self):
        world = submitted()
        world.admit(2)
        other = make_queue(quota={"nodes": 0})
        world.queue = replace(other, metadata=replace(other.metadata, name="vip"))
        world.spec(job_queue="vip")
        world.settle()
        assert world.gangs == []
        assert "The job requests admission in TorchrunQueue vip." in world.job.status.message

    def test_an_admission_without_a_record_admits_nothing(self):
        world = submitted()
        world.admit(2)
        bare = replace(world.job.status, admission=Admission(nodes=2))
        world.job = replace(world.job, status=bare)
        world.settle()
        assert world.gangs == []
        assert "does not record its resource requests yet" in world.job.status.message

    def test_the_status_confirms_a_withdrawn_admission(self):
        world = self.edited(gpus=8)
        world.admission(False, "AdmissionOutdated", "8 GPUs are asked for", 2)
        world.settle()
        assert (world.phase, world.job.status.reason) == ("Queued", "AdmissionOutdated")
        assert world.job.status.message == "8 GPUs are asked for"

    @pytest.mark.parametrize(
        "spec",
        [
            {"containers": [{"name": "trainer", "resources": {"limits": {GPU: 8}}}]},
            {"containers": [{"name": "beside", "resources": {"limits": {GPU: "8"}}}]},
            {"initContainers": [{"name": "before", "resources": {"requests": {GPU: 8}}}]},
        ],
    )
    def test_requests_include_the_pod_template(self, spec):
        world = running(GPUS, nodeResources={"gpus": 0})
        world.spec(pod_template=PodTemplate(spec=spec))
        world.delete_child_job()
        world.settle()
        assert len(world.gangs) == 1
        assert "8 GPUs on each node, but was admitted with 0." in world.job.status.message

    def test_invalid_resources_of_a_pod_template_are_refused(self):
        beside = {"name": "beside", "resources": {"limits": {GPU: "many"}}}
        world = submitted(podTemplate={"spec": {"containers": [beside]}})
        assert world.job.status.reason == "InvalidSpec"
        assert (
            "podTemplate: the resources of the pods are invalid: 'many'" in world.job.status.message
        )

    def test_requests_of_head_and_workers_are_compared_separately(self):
        head = {"nodeResources": {"gpus": 0, "cpus": 2, "memory": "1Gi"}}
        world = running({**GPUS, "quota": {"nodes": 8}}, numNodes=3, head=head)
        world.spec(head=Head(node_resources=JobNodeResources(gpus=8)))
        world.delete_child_job()
        world.settle()
        assert len(world.gangs) == 1
        assert "8 GPUs on the first node, but was admitted with 0." in (world.job.status.message)


def test_a_gang_has_the_labels_of_its_job_and_its_queue():
    """The TorchrunJob may be deleted before its pods end."""
    world = submitted({"nodeResources": {"gpus": 8, "cpus": 96}})
    (gang,) = world.gangs
    for labels in (gang.metadata.labels, *(pod.metadata.labels for pod in pods_of(world))):
        assert (labels.job_uid, labels.queue) == ("uid-train", "gpu")


class TestPreemption:
    def test_preemption_ends_the_gang_with_its_grace_period(self):
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
        assert "Waiting for 2 pods to terminate" in world.job.status.message
        world.containers_stop()
        world.settle()
        assert (world.phase, world.job.status.reason) == ("Preempted", "Preempted")
        assert world.gangs[1:] == []

    def test_a_preempted_job_continues_after_a_new_admission(self):
        world = running()
        world.preempt()
        world.settle()
        world.containers_stop()
        world.settle()
        world.admission(False, "InsufficientQuota", "1st in gpu", None)
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

    def test_an_unused_admission_can_be_withdrawn(self):
        """The status confirms it before the charge is removed, so no gang is being created."""
        world = submitted()
        world.admit(2)
        world.preempt()
        world.settle()
        assert (world.phase, world.job.status.reason) == ("Preempted", "Preempted")
        assert world.gangs == []
        assert world.job.status.attempts == ()

    def test_an_unrecorded_gang_is_recorded_first(self):
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

    def test_a_failure_during_preemption_is_not_restarted(self):
        world = running()
        world.preempt()
        world.pod(world.workers()[0].metadata.name, phase="Failed")
        world.settle()
        assert (world.phase, world.job.status.restarts) == ("Preempted", 0)

    def test_suspension_wins_over_preemption_and_success_over_both(self):
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

    def test_a_restart_after_a_preemption_is_not_delayed(self):
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

    def test_preemption_records_pods_on_lost_nodes_and_does_not_wait(self):
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


@pytest.mark.parametrize(
    ("condition", "nodes"),
    [
        (None, 0),
        (("True", "Admitted"), 2),
        (("False", admission_status.PREEMPTED), 2),
        (("False", admission_status.OUTDATED), 2),
        (("False", "Requeued"), 0),
    ],
)
def test_a_charge_counts_only_with_its_condition(condition, nodes):
    conditions = ()
    if condition is not None:
        conditions = (Condition(type="Admitted", status=condition[0], reason=condition[1]),)
    status = TorchrunJobStatus(admission=Admission(nodes=2), conditions=conditions)
    assert admission_status.charged(replace(make_job(), status=status)) == nodes
