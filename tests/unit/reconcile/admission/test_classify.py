"""What a job is to the coordinator, and what it says of it."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from admitting import QUOTA, running, submitted
from torchrun_api.admission import Admission, AdmittedHead
from torchrun_api.core import Pod
from torchrun_api.job import JobNodeResources
from torchrun_api.kinds import PODS
from torchrun_api.meta import Condition
from torchrun_api.shared import PodTemplate
from torchrun_controller.reconcile.admission.classify import Classification, classify_job
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.inputs import ClassifiedJob, cluster_state
from torchrun_controller.reconcile.admission.model import (
    Decisions,
    Grant,
    PendingStatus,
    Preemption,
)
from torchrun_controller.reconcile.admission.statuses import (
    JobAdmission,
    JobUpdates,
    Stage,
    StatusUpdate,
    job_admission,
)
from torchrun_controller.reconcile.spec.admission_status import charged
from world import START, World, make_queue

GPU = "nvidia.com/gpu"
NOBODY: frozenset[str] = frozenset()


def classified(world: World, lost: frozenset[str] = NOBODY) -> Classification:
    pods = tuple(o for o in world.objects.values() if isinstance(o, Pod))
    return classify_job(world.job, world.queue, world.observed().gang.child_jobs, pods, lost)


def word(world: World, **decided: object) -> StatusUpdate | None:
    jobs = JobUpdates(Decisions(**decided))
    return jobs.update(world.job, classified(world), world.now)


def hear(world: World, **decided: object) -> Stage:
    """The coordinator's word arrives."""
    said = word(world, **decided)
    assert said is not None
    status = said.status
    others = tuple(c for c in world.job.status.conditions if c.type != "Admitted")
    world.job = replace(
        world.job,
        status=replace(
            world.job.status,
            conditions=(*others, *status.conditions),
            admission=status.admission,
            queue_position=status.queue_position,
        ),
    )
    return said.stage


def waits(**fields: object) -> dict[str, PendingStatus]:
    wait = PendingStatus(
        **{"reason": "InsufficientQuota", "message": "no room", "position": 1, **fields}
    )
    return {"uid-train": wait}


class TestInLine:
    def test_who_lacks_nothing_but_the_admission_waits(self):
        request = classified(submitted(priority=3)).workload
        assert (request.nodes, request.admitted, request.priority) == (2, 0, 3)
        assert request.pod == {"pods": 1}

    def test_a_head_that_asks_for_no_more_than_a_worker_counts_for_itself(self):
        head = {"nodeResources": {"gpus": 0, "cpus": 2, "memory": "1Gi"}}
        node = {"gpus": 8, "cpus": 96, "memory": "512Gi"}
        world = running({**QUOTA, "nodeResources": node}, numNodes=3, head=head)
        for pod, where in zip(world.workers(), ["a", "b", "b"], strict=True):
            world.place(pod.metadata.name, where)
        request = classified(world).workload
        assert (request.nodes, request.admitted, request.gpus, request.head_gpus) == (3, 3, 8, 0)
        assert request.pod["nvidia.com/gpu"] == 8
        assert request.head == {"pods": 1, "cpu": 2000, "memory": 1 << 30}
        assert request.placed == {"b": 2}, "its head may be where no worker could"

    def test_a_larger_head_and_its_workers_count_for_the_larger_of_the_two(self):
        world = submitted(numNodes=3, head={"nodeResources": {"gpus": 0, "cpus": 64}})
        node = {"gpus": 8, "cpus": 96, "memory": "512Gi"}
        world.queue = make_queue(**QUOTA, nodeResources=node)
        world.spec(node_resources=JobNodeResources(gpus=4))
        request = classified(world).workload
        assert (request.nodes, request.gpus, request.head) == (3, 4, None)
        gib = 1 << 30
        assert request.pod == {
            "pods": 1, "cpu": 64_000, "memory": 512 * gib, "nvidia.com/gpu": 4,
        }  # fmt: skip
        assert request.created.tzinfo is not None

    def test_what_pod_templates_add_counts(self):
        beside = {"name": "beside", "resources": {"requests": {"cpu": 1}, "limits": {GPU: 1}}}
        queue = {
            **QUOTA,
            "nodeResources": {"gpus": 2, "cpus": 4},
            "podTemplate": {"spec": {"containers": [beside]}},
        }
        world = submitted(queue)
        request = classified(world).workload
        assert request.pod == {"pods": 1, "cpu": 5000, GPU: 3}
        assert request.gpus == 3

    def test_of_templates_that_cannot_be_read_nothing_is_asked(self):
        world = submitted()
        beside = {"name": "beside", "resources": {"limits": {GPU: "many"}}}
        world.spec(pod_template=PodTemplate(spec={"containers": [beside]}))
        assert classified(world).workload.pod == {"pods": 1}

    def test_priority_and_selector_come_from_queue_and_job(self):
        queue = {
            **QUOTA,
            "priority": 7,
            "nodeResources": {"gpus": 4, "cpus": "1500m", "memory": "1Ki"},
            "scheduling": {"nodeSelector": {"zone": "a"}},
        }
        world = submitted(queue, scheduling={"nodeSelector": {"kind": "h100"}})
        request = classified(world).workload
        assert request.priority == 7
        assert request.node_selector == {"zone": "a", "kind": "h100"}
        assert request.pod == {"pods": 1, "cpu": 1500, "memory": 1024, "nvidia.com/gpu": 4}
        assert request.gpus == 4

    @pytest.mark.parametrize(
        ("own", "counts"), [(None, 5), (3, 3), (5, 5), (1_000_000, 5)], ids=str
    )
    def test_no_priority_counts_for_more_than_the_queue_allows(self, own, counts):
        """Refused before its admission; the limit may be newer than that."""
        world = submitted(priority=own)
        world.queue = make_queue(**QUOTA, priority=7, limits={"maxPriority": 5})
        assert classified(world).workload.priority == counts

    def test_who_lacks_something_else_does_not(self):
        world = submitted()
        world.spec(num_nodes=None)
        world.settle()
        assert classified(world).workload is None

    def test_who_is_paused_or_deleted_does_not(self):
        world = submitted()
        paused = replace(world.job, spec=replace(world.job.spec, suspend=True))
        meta = replace(world.job.metadata, deletion_timestamp=START)
        for job in (paused, replace(world.job, metadata=meta)):
            world.job = job
            assert classified(world).workload is None

    def test_it_is_told_where_it_stands_and_why(self):
        world = submitted()
        assert hear(world, pending=waits()) is Stage.REPORT
        assert world.condition("Admitted").reason == "InsufficientQuota"
        assert world.job.status.queue_position == 1
        assert word(world, pending=waits()) is None, "nothing new"
        assert hear(world, pending=waits(nominated=True)) is Stage.NOMINATE
        assert classified(world).workload.nominated
        assert hear(world, pending=waits()) is Stage.RELEASE, "the room is others' again"

    def test_a_place_far_behind_may_be_out_by_a_quarter(self):
        world = submitted()
        hear(world, pending=waits(position=1000))
        assert word(world, pending=waits(position=801)) is None
        assert word(world, pending=waits(position=799)) is not None
        assert word(world, pending=waits(position=999, message="other")) is not None
        hear(world, pending=waits(position=21))
        assert word(world, pending=waits(position=20)) is not None

    def test_of_whom_nothing_was_decided_nothing_is_said(self):
        assert word(submitted()) is None

    def test_the_admission(self):
        world = submitted()
        hear(world, pending=waits())
        world.pass_time(seconds=9)
        assert hear(world, grants=(Grant(uid="uid-train", nodes=2),)) is Stage.ADMIT
        assert world.condition("Admitted").message == "admitted for 2 nodes"
        assert world.job.status.admission == Admission(nodes=2, queue="gpu", time=world.now)
        assert world.job.status.queue_position is None
        world.settle()
        assert len(world.gangs) == 1


class TestHolding:
    def test_what_it_holds_and_where_it_runs(self):
        world = running(reliability={"activeDeadlineSeconds": 100})
        world.place(world.workers()[0].metadata.name, "node-2")
        found = classified(world)
        request = found.workload
        assert (request.nodes, request.admitted, request.running) == (2, 2, True)
        assert request.placed == {"node-1": 1, "node-2": 1}
        assert request.since == START
        assert found.deadline == timedelta(seconds=100)

    def test_a_restart_holds_it(self):
        world = running()
        for pod in world.workers():
            world.pod(pod.metadata.name, phase="Failed")
        assert classified(world).workload.admitted == 2

    def test_more_is_asked_for_and_waited_for(self):
        world = running(elastic={"minNodes": 1, "maxNodes": 4})
        world.spec(num_nodes=4)
        assert classified(world).workload.nodes == 4
        hear(world, pending=waits(position=0))
        assert world.condition("Admitted").status == "True"
        assert world.condition("Admitted").message == "admitted for 2 nodes of 4; no room"
        hear(world, grants=(Grant(uid="uid-train", nodes=4),))
        assert world.job.status.admission == Admission(nodes=4, queue="gpu", time=START)

    def test_less_is_given_back_once_the_larger_gang_is_gone(self):
        world = running(elastic={"minNodes": 1, "maxNodes": 4})
        world.spec(num_nodes=1)
        assert classified(world).workload.nodes == 2, "reconcile has not seen it yet"
        world.settle()
        assert classified(world).workload.nodes == 2, "its pods still end"
        world.containers_stop()
        world.settle()
        assert classified(world).workload.nodes == 1
        assert hear(world, grants=(Grant(uid="uid-train", nodes=1),)) is Stage.RELEASE
        assert world.condition("Admitted").message == "admitted for 1 node"

    def test_a_job_that_is_being_deleted_asks_for_nothing(self):
        world = running(elastic={"minNodes": 1, "maxNodes": 4})
        world.spec(num_nodes=4)
        meta = replace(world.job.metadata, deletion_timestamp=START)
        world.job = replace(world.job, metadata=meta)
        assert classified(world).workload.nodes == 2

    def test_a_spec_that_makes_no_run_any_more_counts_as_it_was_admitted(self):
        world = running({"quota": {"gpus": 16}, "nodeResources": {"gpus": 8}})
        world.spec(num_nodes=None)
        request = classified(world).workload
        assert (request.nodes, request.gpus) == (2, 8)

    def test_without_a_record_it_counts_as_it_ran_and_is_recorded(self):
        world = running()
        status = replace(world.job.status, gpus=16, admission=Admission(nodes=2, time=START))
        world.job = replace(world.job, status=status)
        world.spec(num_nodes=None)
        request = classified(world).workload
        assert (request.nodes, request.gpus) == (2, 8)
        assert hear(world) is Stage.REPORT
        assert world.job.status.admission == Admission(nodes=2, queue="gpu", gpus=8, time=START)

    def test_a_pause_gives_back_when_nothing_runs(self):
        world = running()
        world.spec(suspend=True)
        assert classified(world).workload.admitted == 2
        world.settle()
        assert classified(world).workload.admitted == 2, "its pods still end"
        world.containers_stop()
        world.settle()
        assert hear(world) is Stage.RELEASE
        assert job_admission(world.job) == JobAdmission()

    def test_a_pause_of_which_only_an_older_status_speaks_gives_nothing_back(self):
        """Resumed and paused again, while reconcile was making the gang in between."""
        world = running()
        world.spec(suspend=True)
        world.settle()
        world.containers_stop()
        world.settle()
        world.spec(suspend=False)
        world.spec(suspend=True)
        assert classified(world).workload.admitted == 2

    def test_the_end_gives_back_when_nothing_runs(self):
        world = running(reliability={"maxRestarts": 0})
        world.pod(world.workers()[0].metadata.name, phase="Failed")
        world.settle()
        assert world.phase == "Failed"
        assert classified(world).workload.admitted == 2, "a survivor still ends"
        world.job_condition("Failed")
        survivor = world.workers()[1]
        world.place(survivor.metadata.name, "gone")
        assert classified(world, frozenset({"gone"})).workload is None, (
            "nobody waits for lost nodes"
        )
        world.containers_stop()
        assert hear(world) is Stage.RELEASE

    def test_without_its_queue_it_holds_what_it_has_and_no_more(self):
        world = running()
        world.queue = None
        found = classified(world)
        assert (found.takes_part, found.workload.admitted, found.workload.nodes) == (True, 2, 2)
        assert found.workload.priority == 0

    def test_of_a_queue_that_takes_no_part_what_runs_takes_room(self):
        world = submitted({"weight": None})
        assert (classified(world).takes_part, classified(world).workload.admitted) == (False, 2)
        assert word(world) is None
        world.all_workers("Succeeded")
        world.job_condition("Complete")
        assert classified(world).workload is None

    def test_what_runs_when_its_queue_comes_to_take_part_goes_on(self):
        world = submitted({"weight": None})
        world.queue = make_queue(**QUOTA)
        assert classified(world).workload.admitted == 2
        assert hear(world) is Stage.ADMIT
        assert world.job.status.admission.nodes == 2
        world.settle()
        assert len(world.gangs) == 1

    def test_a_queue_that_takes_no_part_any_more_has_nothing_said(self):
        world = running()
        world.queue = make_queue()
        assert hear(world) is Stage.RELEASE
        assert job_admission(world.job) == JobAdmission()


class TestGivingWay:
    def preempted(self) -> World:
        world = running()
        gives_way = Preemption(
            uid="uid-train", for_uid="uid-urgent", reason="HigherPriority", message="for urgent"
        )
        assert hear(world, preemptions=(gives_way,)) is Stage.PREEMPT
        assert world.job.status.admission == Admission(
            nodes=2, queue="gpu", time=START, preempted_for="uid-urgent"
        )
        return world

    def test_it_is_charged_until_nothing_of_it_runs_and_reconcile_has_said_so(self):
        world = self.preempted()
        assert classified(world).workload.preempted_for == "uid-urgent"
        assert word(world) is None
        world.settle()
        assert classified(world).workload.admitted == 2
        world.containers_stop()
        assert classified(world).workload.admitted == 2, "reconcile has not said so"
        world.settle()
        assert classified(world).requeued
        assert hear(world) is Stage.RELEASE
        assert world.condition("Admitted").reason == "Requeued"
        assert classified(world).workload is None, "reconcile has not requested it again"
        world.settle()
        assert world.phase == "Preempted"
        assert classified(world).workload.admitted == 0

    def test_a_gang_that_was_under_way_is_not_overlooked(self):
        """Admitted, made and preempted in one moment: the cache shows no gang yet."""
        world = submitted()
        hear(world, grants=(Grant(uid="uid-train", nodes=2),))
        hidden = world.job
        world.step(writes=9)
        world.job = hidden
        world.preempt()
        gangs = {key: o for key, o in world.objects.items() if key[0] != PODS.plural}
        world.objects = {}
        assert classified(world).workload.admitted == 2
        world.objects = gangs
        world.settle()
        assert [a.reason for a in world.job.status.attempts] == ["Preempted"]


EIGHT_GPUS = {"quota": {"gpus": 8}, "nodeResources": {"gpus": 8}}


class TestOtherRequests:
    """The spec, or the queue's nodes, ask for more than was admitted."""

    def outdated(self) -> World:
        world = running(EIGHT_GPUS, numNodes=4, nodeResources={"gpus": 0})
        world.spec(node_resources=JobNodeResources(gpus=8))
        world.settle()
        return world

    def test_a_charge_is_what_was_admitted_while_the_gang_runs(self):
        world = self.outdated()
        found = classified(world)
        assert (found.workload.admitted, found.workload.nodes, found.workload.gpus) == (4, 4, 0)
        assert found.workload.queue == "gpu"
        assert found.outdated == ""
        assert word(world) is None

    def test_it_is_withdrawn_once_reconcile_waits_for_another(self):
        world = self.outdated()
        world.delete_child_job()
        assert classified(world).outdated == "", "reconcile has not said that it waits"
        world.settle()
        assert hear(world) is Stage.REPORT
        assert world.condition("Admitted").reason == "AdmissionOutdated"
        assert "8 GPUs on each node are asked for, 0 were admitted" in (
            world.condition("Admitted").message
        )
        assert charged(world.job) == 4, "a gang may be under way that fits"
        assert classified(world).requeued is False
        world.settle()
        assert classified(world).requeued
        assert hear(world) is Stage.RELEASE
        world.settle()
        request = classified(world).workload
        assert (request.admitted, request.nodes, request.gpus) == (0, 4, 8)

    def test_a_queue_that_is_edited_back_loses_no_gang(self):
        """Withdrawn at the moment in which reconcile makes a gang that fits again."""
        world = running(EIGHT_GPUS, numNodes=1, nodeResources={})
        world.queue = make_queue(quota={"gpus": 8}, nodeResources={"gpus": 16})
        world.delete_child_job()
        world.settle()
        withdraws = word(world)
        world.queue = make_queue(**EIGHT_GPUS)
        world.step(writes=9)
        assert len(world.gangs) == 2
        world.job = replace(
            world.job,
            status=replace(
                world.job.status,
                admission=withdraws.status.admission,
                conditions=withdraws.status.conditions,
            ),
        )
        world.settle()
        assert charged(world.job) == 1
        assert classified(world).requeued is False
        assert hear(world) is Stage.REPORT
        assert world.condition("Admitted").status == "True"

    def test_a_larger_size_with_larger_pods_is_no_wish_to_grow(self):
        world = running(
            {"quota": {"nodes": 8}, "nodeResources": {"gpus": 8}},
            nodeResources={"gpus": 4},
            elastic={"minNodes": 1, "maxNodes": 4},
        )
        world.spec(num_nodes=4, node_resources=JobNodeResources(gpus=8))
        assert classified(world).workload.nodes == 2
        world.spec(num_nodes=4, node_resources=JobNodeResources(gpus=2))
        request = classified(world).workload
        assert (request.nodes, request.gpus) == (4, 4)

    def test_only_an_elastic_gang_grows(self):
        """GPUs in all, on nodes that have become smaller: more nodes."""
        queue = {"quota": {"nodes": 8}, "nodeResources": {"gpus": 8}}
        world = submitted(queue, numNodes=None, numGPUs=16)
        world.admit(2)
        world.queue = make_queue(quota={"nodes": 8}, nodeResources={"gpus": 4})
        assert classified(world).workload.nodes == 2

    def test_a_wish_to_grow_that_is_granted_needs_no_other_admission(self):
        world = running(elastic={"minNodes": 1, "maxNodes": 4})
        world.spec(num_nodes=4)
        world.delete_child_job()
        world.settle()
        assert classified(world).outdated == "4 nodes are asked for"
        hear(world, grants=(Grant(uid="uid-train", nodes=4),))
        assert world.condition("Admitted").status == "True"
        world.settle()
        assert [gang.spec.completions for gang in world.gangs] == [2, 4]

    def test_a_head_is_recorded_as_it_was_admitted(self):
        head = {"nodeResources": {"gpus": 0, "cpus": "500m", "memory": "1Gi"}}
        node = {"gpus": 8, "cpus": 96, "memory": "512Gi"}
        world = submitted({**QUOTA, "nodeResources": node}, numNodes=3, head=head)
        before = classified(world).workload
        hear(world, grants=(Grant(uid="uid-train", nodes=3),))
        admission = world.job.status.admission
        assert admission.requests == {"cpu": "96", "memory": "512Gi", "nvidia.com/gpu": 8}
        assert admission.head == AdmittedHead(requests={"cpu": "500m", "memory": "1Gi"})
        after = classified(world).workload
        assert (after.pod, after.head, after.head_gpus) == (before.pod, before.head, 0)
        world.settle()
        assert len(world.gangs) == 1

    def test_a_record_that_cannot_be_read_is_none(self):
        world = running()
        admission = replace(world.job.status.admission, requests={"cpu": "lots"})
        world.job = replace(world.job, status=replace(world.job.status, admission=admission))
        assert classified(world).workload.admitted == 2


@pytest.mark.parametrize("forged", [{"nodes": -5}, {"preempted_for": "x"}])
def test_what_was_never_ours_to_say_is_taken_back_and_decides_nothing(forged):
    world = submitted()
    admission = Admission(**{"nodes": 0, **forged})
    world.job = replace(world.job, status=replace(world.job.status, admission=admission))
    assert charged(world.job) == 0
    assert hear(world, pending=waits()) is Stage.REPORT
    assert job_admission(world.job).admission is None


@pytest.mark.parametrize("known", [True, False])
def test_the_state_of_all(known):
    world = running(reliability={"activeDeadlineSeconds": 100})
    world.pass_time(seconds=30)
    world.node("node-1")
    silent = Classification()
    orphan = classified(world).workload
    state = cluster_state(
        [world.queue, make_queue()],
        [ClassifiedJob(world.job, classified(world)), ClassifiedJob(world.job, silent)],
        [replace(orphan, uid="gone")],
        tuple(world.nodes.values()) if known else None,
        world.now,
    )
    assert [queue.name for queue in state.queues] == ["gpu"]
    assert [request.uid for request in state.workloads] == ["gone", "uid-train"]
    assert state.workloads[1].seconds_left == 70
    assert (state.nodes is not None) is known


def test_when_one_of_thousands_is_admitted_few_statuses_change():
    queue = make_queue(quota={"nodes": 2})
    waiting = submitted().job
    named = (
        replace(waiting, metadata=replace(waiting.metadata, name=f"j{n}", uid=f"u{n:04}"))
        for n in range(2000)
    )
    entries = [ClassifiedJob(job, classify_job(job, queue, (), (), NOBODY)) for job in named]

    def decide() -> list[StatusUpdate]:
        decisions = admit(cluster_state([queue], entries, (), None, START), START)
        jobs = JobUpdates(decisions)
        words = [jobs.update(entry.job, entry.classification, START) for entry in entries]
        return [word for word in words if word is not None]

    told = {word.owner.metadata.uid: word.status for word in decide()}
    assert len(told) == 2000
    jobs = [replace(e.job, status=told[e.job.metadata.uid]) for e in entries]
    ask = Condition(type="AdmissionRequested", status="True", reason="WaitingForAdmission")
    asking = [
        replace(job, status=replace(job.status, conditions=(*job.status.conditions, ask)))
        for job in jobs
    ]
    entries = [ClassifiedJob(job, classify_job(job, queue, (), (), NOBODY)) for job in asking]
    assert decide() == []
    assert entries.pop(0).classification.workload.admitted == 2
    words = decide()
    assert [word.owner.metadata.name for word in words if word.stage is Stage.ADMIT] == ["j1"]
    assert len(words) < 40
