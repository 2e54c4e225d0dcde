"""An admitted job: its charge, and when it releases it."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from admitting import QUOTA, running, submitted
from torchrun_api.kinds.admission import Admission
from torchrun_api.kinds.core import Container, JobStatus, Pod, Resources
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import PODS
from torchrun_controller.reconcile.admission.classify import running_gang
from torchrun_controller.reconcile.admission.model import (
    Grant,
    Preemption,
)
from torchrun_controller.reconcile.admission.statuses import (
    JobAdmission,
    Stage,
    job_admission,
)
from unit.reconcile.admission.classifying import (
    classify_world,
    deliver,
    pending,
    status_update,
)
from world import START, World, make_queue


class TestHolding:
    def test_the_charge_and_the_nodes_of_an_admitted_job(self):
        world = running(reliability={"activeDeadlineSeconds": 100})
        world.place(world.workers()[0].metadata.name, "node-2")
        found = classify_world(world)
        request = found.workload
        assert (request.nodes, request.admitted, request.running) == (2, 2, True)
        assert request.pods_by_node == {"node-1": 1, "node-2": 1}
        assert request.since == START
        assert found.deadline == timedelta(seconds=100)

    def test_a_restart_keeps_the_charge(self):
        world = running()
        for pod in world.workers():
            world.pod(pod.metadata.name, phase="Failed")
        assert classify_world(world).workload.admitted == 2

    def test_a_larger_size_waits_for_its_admission(self):
        world = running(elastic={"minNodes": 1, "maxNodes": 4})
        world.spec(num_nodes=4)
        assert classify_world(world).workload.nodes == 4
        deliver(world, pending=pending(position=0))
        assert world.condition("Admitted").status == "True"
        assert world.condition("Admitted").message == "Admitted for 2 of 4 nodes. no room"
        deliver(world, grants=(Grant(uid="uid-train", nodes=4),))
        assert world.job.status.admission == Admission(nodes=4, queue="gpu", time=START)

    def test_a_smaller_size_is_released_after_the_larger_gang(self):
        world = running(elastic={"minNodes": 1, "maxNodes": 4})
        world.spec(num_nodes=1)
        assert classify_world(world).workload.nodes == 2, "reconcile has not seen the edit yet"
        world.settle()
        assert classify_world(world).workload.nodes == 2, "its pods are still terminating"
        world.containers_stop()
        world.settle()
        assert classify_world(world).workload.nodes == 1
        assert deliver(world, grants=(Grant(uid="uid-train", nodes=1),)) is Stage.RELEASE
        assert world.condition("Admitted").message == "Admitted for 1 node."

    def test_a_terminating_job_requests_nothing(self):
        world = running(elastic={"minNodes": 1, "maxNodes": 4})
        world.spec(num_nodes=4)
        meta = replace(world.job.metadata, deletion_timestamp=START)
        world.job = replace(world.job, metadata=meta)
        assert classify_world(world).workload.nodes == 2

    def test_an_invalid_spec_keeps_the_charge_of_its_admission(self):
        world = running({"quota": {"gpus": 16}, "nodeResources": {"gpus": 8}})
        world.spec(num_nodes=None)
        request = classify_world(world).workload
        assert (request.nodes, request.gpus) == (2, 8)

    def test_a_running_job_without_a_record_is_charged_and_recorded(self):
        world = running({**QUOTA, "nodeResources": {"gpus": 8}})
        status = replace(world.job.status, admission=Admission(nodes=2, time=START))
        world.job = replace(world.job, status=status)
        world.queue = None
        request = classify_world(world).workload
        assert (request.nodes, request.gpus) == (2, 8)
        assert deliver(world) is Stage.REPORT
        assert world.job.status.admission == Admission(
            nodes=2, queue="gpu", requests={"nvidia.com/gpu": 8}, gpus=8, time=START
        )

    @pytest.mark.parametrize(
        ("condition", "status", "nodes"),
        [
            ("Complete", "True", 0),
            ("Failed", "True", 0),
            ("Failed", "False", 2),
            ("FailureTarget", "True", 0),
        ],
    )
    def test_a_child_job_counts_while_it_may_create_pods(self, condition, status, nodes):
        (child,) = running().gangs
        conditions = (Condition(type=condition, status=status, reason="x"),)
        child = replace(child, status=JobStatus(conditions=conditions))
        assert running_gang((child,), (), frozenset()).nodes == nodes

    @pytest.mark.parametrize("completions", [2, 10_000, 2_000_000_000])
    def test_a_user_who_edits_the_size_of_a_job_charges_nothing(self, completions):
        world = running()
        (child,) = world.gangs
        world.objects["jobs", child.metadata.name] = replace(
            child, spec=replace(child.spec, completions=completions, parallelism=completions)
        )
        assert classify_world(world).workload.admitted == 2

    def test_without_their_jobs_the_workers_of_the_latest_attempt_have_the_charge(self):
        def of_attempt(pod: Pod, attempt: str) -> Pod:
            containers = (Container(resources=Resources(requests={"cpu": attempt})),)
            labels = replace(pod.metadata.labels, attempt=attempt)
            return replace(
                pod,
                metadata=replace(pod.metadata, labels=labels),
                spec=replace(pod.spec, containers=containers),
            )

        first, second = running().workers()
        gang = running_gang((), (of_attempt(first, "4"), of_attempt(second, "3")), frozenset())
        assert gang.pod is not None
        assert gang.pod.containers[0].resources.requests == {"cpu": "4"}

    def test_a_suspension_releases_the_charge_when_nothing_runs(self):
        world = running()
        world.spec(suspend=True)
        assert classify_world(world).workload.admitted == 2
        world.settle()
        assert classify_world(world).workload.admitted == 2, "its pods are still terminating"
        world.containers_stop()
        world.settle()
        assert deliver(world) is Stage.RELEASE
        assert job_admission(world.job) == JobAdmission()

    def test_a_second_suspension_without_its_own_status_releases_nothing(self):
        """Resumed and suspended again, while reconcile was creating the gang in between."""
        world = running()
        world.suspend()
        world.spec(suspend=False)
        world.spec(suspend=True)
        assert classify_world(world).workload.admitted == 2

    def test_a_finished_job_releases_the_charge_when_nothing_runs(self):
        world = running(reliability={"maxRestarts": 0})
        world.pod(world.workers()[0].metadata.name, phase="Failed")
        world.settle()
        assert world.phase == "Failed"
        assert classify_world(world).workload.admitted == 2, "a pod is still terminating"
        world.job_condition("Failed")
        survivor = world.workers()[1]
        world.place(survivor.metadata.name, "gone")
        assert classify_world(world, frozenset({"gone"})).workload is None, (
            "lost machines are not waited for"
        )
        world.containers_stop()
        assert deliver(world) is Stage.RELEASE

    def test_without_its_queue_a_job_keeps_its_charge_only(self):
        world = running()
        world.queue = None
        found = classify_world(world)
        assert (found.takes_part, found.workload.admitted, found.workload.nodes) == (True, 2, 2)
        assert found.workload.priority == 0

    def test_without_its_queue_and_a_charge_a_job_takes_no_part(self):
        world = submitted({"weight": None})
        world.queue = None
        found = classify_world(world)
        assert (found.takes_part, found.workload.admitted) == (False, 2)

    def test_a_gang_that_ends_when_its_queue_begins_to_take_part_is_charged(self):
        world = submitted({"weight": None})
        world.all_workers("Running")
        world.settle()
        world.queue = make_queue(**QUOTA)
        assert classify_world(world).workload.admitted == 2
        world.job_condition("FailureTarget")
        assert classify_world(world).workload.admitted == 2
        world.all_workers("Failed")
        assert classify_world(world).workload is None

    def test_pods_that_come_back_do_not_admit_a_job_that_waits(self):
        """They were on a lost machine when it returned its admission."""
        world = submitted(QUOTA)
        pods = {key: one for key, one in running().objects.items() if isinstance(one, Pod)}
        world.objects.update(pods)
        assert classify_world(world).workload.admitted == 0

    def test_running_jobs_of_a_queue_without_admission_use_nodes(self):
        world = submitted({"weight": None})
        assert (classify_world(world).takes_part, classify_world(world).workload.admitted) == (
            False,
            2,
        )
        assert status_update(world) is None
        world.all_workers("Succeeded")
        world.job_condition("Complete")
        assert classify_world(world).workload is None

    def test_a_running_job_continues_when_its_queue_gets_admission(self):
        world = submitted({"weight": None})
        world.queue = make_queue(**QUOTA)
        assert classify_world(world).workload.admitted == 2
        assert deliver(world) is Stage.ADMIT
        assert world.job.status.admission.nodes == 2
        world.settle()
        assert len(world.gangs) == 1

    def test_a_queue_that_loses_admission_clears_the_status(self):
        world = running()
        world.queue = make_queue()
        assert deliver(world) is Stage.RELEASE
        assert job_admission(world.job) == JobAdmission()


class TestGivingWay:
    def preempted(self) -> World:
        world = running()
        gives_way = Preemption(
            uid="uid-train", for_uid="uid-urgent", reason="HigherPriority", message="for urgent"
        )
        assert deliver(world, preemptions=(gives_way,)) is Stage.PREEMPT
        assert world.job.status.admission == Admission(
            nodes=2, queue="gpu", time=START, preempted_for="uid-urgent"
        )
        return world

    def test_a_preempted_job_is_charged_until_it_has_stopped(self):
        world = self.preempted()
        assert classify_world(world).workload.preempted_for == "uid-urgent"
        assert status_update(world) is None
        world.settle()
        assert classify_world(world).workload.admitted == 2
        world.containers_stop()
        assert classify_world(world).workload.admitted == 2, "the status is not updated yet"
        world.settle()
        assert classify_world(world).requeued
        assert deliver(world) is Stage.RELEASE
        assert world.condition("Admitted").reason == "Requeued"
        assert classify_world(world).workload is None, "reconcile has not requested admission again"
        world.settle()
        assert world.phase == "Preempted"
        assert classify_world(world).workload.admitted == 0

    def test_a_gang_in_creation_is_charged(self):
        """Admitted, created and preempted at once. The cache does not show the gang yet."""
        world = submitted()
        deliver(world, grants=(Grant(uid="uid-train", nodes=2),))
        hidden = world.job
        world.step(writes=9)
        world.job = hidden
        world.preempt()
        gangs = {key: o for key, o in world.objects.items() if key[0] != PODS.plural}
        world.objects = {}
        assert classify_world(world).workload.admitted == 2
        world.objects = gangs
        world.settle()
        assert [a.reason for a in world.job.status.attempts] == ["Preempted"]
