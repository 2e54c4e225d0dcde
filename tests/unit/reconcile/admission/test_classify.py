"""How a job becomes a request of the coordinator, and a decision its status."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from admitting import QUOTA, running, submitted
from torchrun_api.kinds.admission import Admission
from torchrun_api.kinds.job import JobNodeResources
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.shared import PodTemplate
from torchrun_api.kinds.status import Attempt, Checkpoint
from torchrun_controller.reconcile.admission.classify import Classification, classify_job
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.inputs import ClassifiedJob, cluster_state
from torchrun_controller.reconcile.admission.model import (
    Grant,
    Workload,
)
from torchrun_controller.reconcile.admission.statuses import (
    JobUpdates,
    Stage,
    StatusUpdate,
    job_admission,
)
from torchrun_controller.reconcile.spec.admission_status import charged
from unit.reconcile.admission.classifying import (
    NOBODY,
    classify_world,
    deliver,
    pending,
    status_update,
)
from world import START, World, make_queue

GPU = "nvidia.com/gpu"


class TestInLine:
    def test_a_job_that_lacks_only_admission_waits(self):
        request = classify_world(submitted(priority=3)).workload
        assert (request.nodes, request.admitted, request.priority) == (2, 0, 3)
        assert request.pod == {"pods": 1}

    def test_a_small_head_counts_by_its_own_requests(self):
        head = {"nodeResources": {"gpus": 0, "cpus": 2, "memory": "1Gi"}}
        node = {"gpus": 8, "cpus": 96, "memory": "512Gi"}
        world = running({**QUOTA, "nodeResources": node}, numNodes=3, head=head)
        for pod, where in zip(world.workers(), ["a", "b", "b"], strict=True):
            world.place(pod.metadata.name, where)
        request = classify_world(world).workload
        assert (request.nodes, request.admitted, request.gpus, request.head_gpus) == (3, 3, 8, 0)
        assert request.pod["nvidia.com/gpu"] == 8
        assert request.head == {"pods": 1, "cpu": 2000, "memory": 1 << 30}
        assert request.pods_by_node == {"b": 2}, (
            "its head may run on nodes without room for a worker"
        )

    def test_a_larger_head_and_its_workers_count_by_the_larger_requests(self):
        world = submitted(numNodes=3, head={"nodeResources": {"gpus": 0, "cpus": 64}})
        node = {"gpus": 8, "cpus": 96, "memory": "512Gi"}
        world.queue = make_queue(**QUOTA, nodeResources=node)
        world.spec(node_resources=JobNodeResources(gpus=4))
        request = classify_world(world).workload
        assert (request.nodes, request.gpus, request.head) == (3, 4, None)
        gib = 1 << 30
        assert request.pod == {
            "pods": 1, "cpu": 64_000, "memory": 512 * gib, "nvidia.com/gpu": 4,
        }  # fmt: skip
        assert request.created.tzinfo is not None

    def test_requests_of_pod_templates_count(self):
        beside = {"name": "beside", "resources": {"requests": {"cpu": 1}, "limits": {GPU: 1}}}
        queue = {
            **QUOTA,
            "nodeResources": {"gpus": 2, "cpus": 4},
            "podTemplate": {"spec": {"containers": [beside]}},
        }
        world = submitted(queue)
        request = classify_world(world).workload
        assert request.pod == {"pods": 1, "cpu": 5000, GPU: 3}
        assert request.gpus == 3

    def test_invalid_templates_request_nothing(self):
        world = submitted()
        beside = {"name": "beside", "resources": {"limits": {GPU: "many"}}}
        world.spec(pod_template=PodTemplate(spec={"containers": [beside]}))
        assert classify_world(world).workload.pod == {"pods": 1, GPU: 0}

    def test_priority_and_selector_come_from_queue_and_job(self):
        queue = {
            **QUOTA,
            "priority": 7,
            "nodeResources": {"gpus": 4, "cpus": "1500m", "memory": "1Gi"},
            "scheduling": {"nodeSelector": {"zone": "a"}},
        }
        world = submitted(queue, scheduling={"nodeSelector": {"kind": "h100"}})
        request = classify_world(world).workload
        assert request.priority == 7
        assert request.node_selector == {"zone": "a", "kind": "h100"}
        assert request.pod == {"pods": 1, "cpu": 1500, "memory": 1 << 30, "nvidia.com/gpu": 4}
        assert request.gpus == 4

    @pytest.mark.parametrize(
        ("own", "counts"), [(None, 5), (3, 3), (5, 5), (1_000_000, 5)], ids=str
    )
    def test_a_priority_is_limited_by_its_queue(self, own, counts):
        """Such a job is refused before admission, but the limit may be newer."""
        world = submitted(priority=own)
        world.queue = make_queue(**QUOTA, priority=7, limits={"maxPriority": 5})
        assert classify_world(world).workload.priority == counts

    def test_a_job_that_lacks_something_else_does_not_wait(self):
        world = submitted()
        world.spec(num_nodes=None)
        world.settle()
        assert classify_world(world).workload is None

    def test_suspended_and_deleted_jobs_do_not_wait(self):
        world = submitted()
        paused = replace(world.job, spec=replace(world.job.spec, suspend=True))
        meta = replace(world.job.metadata, deletion_timestamp=START)
        for job in (paused, replace(world.job, metadata=meta)):
            world.job = job
            assert classify_world(world).workload is None

    def test_a_waiting_job_has_a_position_and_a_reason(self):
        world = submitted()
        assert deliver(world, pending=pending()) is Stage.REPORT
        assert world.condition("Admitted").reason == "InsufficientQuota"
        assert world.job.status.queue_position == 1
        assert status_update(world, pending=pending()) is None, "no change"
        assert deliver(world, pending=pending(nominated=True)) is Stage.NOMINATE
        assert classify_world(world).workload.nominated
        assert deliver(world, pending=pending()) is Stage.RELEASE, "the nodes are free again"

    def test_the_first_of_a_queue_are_reported_first(self):
        update = status_update(submitted(), pending=pending(position=7))
        assert update is not None
        assert update.rank == 7

    def test_a_late_position_may_be_imprecise_by_a_quarter(self):
        world = submitted()
        deliver(world, pending=pending(position=1000))
        assert status_update(world, pending=pending(position=801)) is None
        assert status_update(world, pending=pending(position=799)) is not None
        assert status_update(world, pending=pending(position=999, message="other")) is not None
        deliver(world, pending=pending(position=22))
        assert status_update(world, pending=pending(position=21)) is None
        assert status_update(world, pending=pending(position=20)) is not None

    def test_updates_are_written_in_the_order_of_their_effects(self):
        """A quota is released before it is granted, and a nomination precedes its preemptions."""
        order = ["RELEASE", "NOMINATE", "PREEMPT", "ADMIT", "QUEUES", "REPORT"]
        assert [stage.name for stage in sorted(Stage)] == order
        assert deliver(submitted(), pending=pending(nominated=True)) < Stage.PREEMPT

    def test_jobs_without_a_decision_have_no_status(self):
        assert status_update(submitted()) is None

    def test_one_node_is_an_admission(self):
        world = submitted(numNodes=1)
        assert deliver(world, grants=(Grant(uid="uid-train", nodes=1),)) is Stage.ADMIT

    def test_a_job_without_an_admission_has_none_to_release(self):
        world = submitted()
        world.settle()
        assert world.job.status.reason == "WaitingForAdmission"
        assert classify_world(world).outdated == ""

    def test_the_admission(self):
        world = submitted()
        deliver(world, pending=pending())
        world.pass_time(seconds=9)
        assert deliver(world, grants=(Grant(uid="uid-train", nodes=2),)) is Stage.ADMIT
        assert world.condition("Admitted").message == "Admitted for 2 nodes."
        assert world.job.status.admission == Admission(nodes=2, queue="gpu", time=world.now)
        assert world.job.status.queue_position is None
        world.settle()
        assert len(world.gangs) == 1


@pytest.mark.parametrize("forged", [{"nodes": -5}, {"preempted_for": "x"}])
def test_an_edited_admission_is_removed_and_has_no_effect(forged):
    world = submitted()
    admission = Admission(**{"nodes": 0, **forged})
    world.job = replace(world.job, status=replace(world.job.status, admission=admission))
    assert charged(world.job) == 0
    assert deliver(world, pending=pending()) is Stage.REPORT
    assert job_admission(world.job).admission is None


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("passed", "left"), [(30, 70), (100, 0), (130, 0)])
def test_the_state_of_all(known, passed, left):
    world = running(reliability={"activeDeadlineSeconds": 100})
    world.pass_time(seconds=passed)
    world.node("node-1")
    silent = Classification(takes_part=False)
    orphan = classify_world(world).workload
    state = cluster_state(
        [world.queue, make_queue()],
        [ClassifiedJob(world.job, classify_world(world)), ClassifiedJob(world.job, silent)],
        [replace(orphan, uid="gone")],
        tuple(world.nodes.values()) if known else None,
        world.now,
    )
    assert [queue.name for queue in state.queues] == ["gpu"]
    assert [request.uid for request in state.workloads] == ["gone", "uid-train"]
    assert state.workloads[1].seconds_left == left
    assert (state.nodes is not None) is known


def stakes(world: World) -> Workload:
    """The workload of this job of a queue that protects gangs for ten minutes."""
    queue = make_queue(quota={"nodes": 9, "minRunSeconds": 600})
    entry = ClassifiedJob(world.job, classify_world(world))
    (workload,) = cluster_state([queue], [entry], (), None, world.now).workloads
    return workload


@pytest.mark.parametrize(
    ("saved_at", "unsaved"),
    [
        pytest.param(None, None, id="none is reported"),
        pytest.param(100, 200, id="of this gang"),
        pytest.param(-500, 300, id="of an earlier gang: since its start"),
        pytest.param(400, 0, id="by a clock that is ahead"),
    ],
)
def test_what_is_lost_counts_from_the_last_checkpoint(saved_at, unsaved):
    world = running(numNodes=2)
    started = world.now
    if saved_at is not None:
        time = started + timedelta(seconds=saved_at)
        saved = Checkpoint(step=1200, path="/c/1200", time=time)
        world.job = replace(world.job, status=replace(world.job.status, last_checkpoint=saved))
    world.pass_time(seconds=300)
    workload = stakes(world)
    assert (workload.ran_seconds, workload.unsaved_seconds) == (300, unsaved)
    assert workload.saved_step == (None if saved_at is None else 1200)
    assert workload.protected_seconds == 300
    world.pass_time(seconds=400)
    assert stakes(world).protected_seconds == 0


def test_preemptions_count_for_a_day():
    world = running(numNodes=2)
    for hours, reason in ((1, "Preempted"), (23, "Preempted"), (25, "Preempted"), (2, "Exception")):
        end = Attempt(number=hours, reason=reason, end_time=world.now - timedelta(hours=hours))
        attempts = (*world.job.status.attempts, end)
        world.job = replace(world.job, status=replace(world.job.status, attempts=attempts))
    assert stakes(world).preemptions == 2


def test_a_gang_that_does_not_run_yet_loses_nothing_and_is_not_protected():
    world = submitted()
    world.admit(2)
    world.settle()
    world.pass_time(seconds=300)
    workload = stakes(world)
    assert workload.admitted == 2
    assert (workload.ran_seconds, workload.protected_seconds) == (0, 0)


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
        updates = [jobs.update(entry.job, entry.classification, START) for entry in entries]
        return [update for update in updates if update is not None]

    statuses = {update.owner.metadata.uid: update.status for update in decide()}
    assert len(statuses) == 2000
    jobs = [replace(e.job, status=statuses[e.job.metadata.uid]) for e in entries]
    ask = Condition(type="AdmissionRequested", status="True", reason="WaitingForAdmission")
    asking = [
        replace(job, status=replace(job.status, conditions=(*job.status.conditions, ask)))
        for job in jobs
    ]
    entries = [ClassifiedJob(job, classify_job(job, queue, (), (), NOBODY)) for job in asking]
    assert decide() == []
    assert entries.pop(0).classification.workload.admitted == 2
    updates = decide()
    assert [update.owner.metadata.name for update in updates if update.stage is Stage.ADMIT] == [
        "j1"
    ]
    assert len(updates) < 40
