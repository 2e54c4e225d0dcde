"""The life of a queue: the conditions of its template and jobs, and its deletion."""

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from queue_world import KAI, QueueWorld, a_job, kai_queue, make_trq
from torchrun_api import names
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.queue import QueueAdmission
from torchrun_api.kinds.status import TorchrunJobStatus, WorkersStatus
from torchrun_controller.reconcile.queue import QueuePlan
from world import START


def status(world: QueueWorld):
    assert world.queue is not None
    return world.queue.status


def test_a_queue_is_active_once_its_template_is_accepted():
    world = QueueWorld(make_trq())
    world.settle()
    assert world.queue is not None
    assert status(world).phase == "Active"
    assert status(world).observed_generation == 1
    assert world.condition("Ready").reason == "Ready"
    assert world.condition("TemplateValid").status == "True"
    assert world.queue.metadata.finalizers == (names.QUEUE_FINALIZER,)
    assert world.condition_types() == ["Ready", "TemplateValid"]
    assert world.events == []


def test_a_queue_needs_two_writes_and_one_trial():
    world = QueueWorld(make_trq())
    plan = world.step()
    assert len(plan.applies) == 1
    assert plan.status is not None
    assert world.step() == QueuePlan()
    assert len(world.trials) == 1


def test_a_restarted_controller_repeats_no_trial():
    world = QueueWorld(make_trq())
    world.settle()
    world.verdict = None
    assert world.step() == QueuePlan()
    assert len(world.trials) == 1


def test_the_sample_is_the_job_of_one_worker():
    world = QueueWorld(make_trq(nodeResources={"gpus": 8, "cpus": 96, "memory": "1Ti"}))
    world.settle()
    (job,) = world.trials
    assert job["metadata"] == {
        "name": "template-uid-ml-g",
        "namespace": "ml",
    }
    assert job["spec"]["completions"] == 1
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_a_queue_without_an_image_is_tried_with_a_placeholder():
    world = QueueWorld(make_trq(image=None))
    world.settle()
    assert status(world).phase == "Active"


def test_a_refused_template_is_reported_and_tried_again_after_a_change():
    world = QueueWorld(make_trq())
    world.trial_result = ("False", "spec.template.spec.nope: field not declared in schema")
    world.settle()
    assert status(world).phase == "Updating"
    assert world.condition("TemplateValid").reason == "Rejected"
    assert "spec.template.spec.nope" in world.condition("Ready").message
    assert world.condition("Ready").status == "False"
    assert world.reasons() == ["Rejected"]
    world.trial_result = ("True", "")
    world.edit()
    world.settle()
    assert status(world).phase == "Active"
    assert len(world.trials) == 2


def test_a_forbidden_trial_stops_nothing():
    world = QueueWorld(make_trq())
    world.trial_result = ("Unknown", "jobs.batch is forbidden")
    world.settle()
    assert world.condition("TemplateValid").status == "Unknown"
    assert status(world).phase == "Active"
    assert world.events == []


def test_an_invalid_queue_needs_no_trial():
    world = QueueWorld(make_trq(podTemplate={"spec": {"restartPolicy": "Always"}}))
    world.settle()
    assert world.trials == []
    assert world.condition("TemplateValid").reason == "InvalidSpec"
    assert "restartPolicy" in world.condition("Ready").message


def test_an_unreadable_spec_removes_nothing():
    world = QueueWorld(make_trq(kaiQueue="training"), KAI)
    world.kai = {"default": kai_queue("default")}
    world.settle()
    assert world.queue is not None
    unreadable = replace(make_trq(), invalid="spec.weight: 'x' is no number")
    world.queue = replace(unreadable, metadata=world.queue.metadata, status=status(world))
    world.settle()
    assert "training" in world.kai
    assert world.condition("Ready").message == "spec.weight: 'x' is no number"


def test_a_weight_of_zero_pauses_the_queue():
    world = QueueWorld(make_trq(weight=0))
    world.settle()
    assert status(world).phase == "Active"
    assert world.condition("Ready").reason == "Paused"
    assert [(e.type, e.reason) for e in world.events] == [("Normal", "Paused")]


def test_jobs_are_counted_by_phase():
    world = QueueWorld(make_trq())
    admitted = replace(
        a_job("admitted"),
        status=TorchrunJobStatus(
            phase="Syncing", conditions=(Condition(type="Admitted", status="True"),)
        ),
    )
    world.jobs = [
        a_job("new"),
        a_job("waits", "Queued"),
        a_job("paused", "Suspended"),
        admitted,
        a_job("starts", "Queued", gang=True),
        a_job("runs", "Running", gang=True),
        a_job("over", "Succeeded"),
    ]
    world.settle()
    jobs = status(world).jobs
    assert jobs is not None
    assert (jobs.pending, jobs.admitted, jobs.running) == (3, 2, 1)


def test_status_fields_of_other_managers_stay():
    world = QueueWorld(make_trq())
    world.settle()
    assert world.queue is not None
    theirs = Condition(type="Theirs", status="True")
    conditions = (theirs, *reversed(status(world).conditions))
    admission = QueueAdmission(summary="1/2 GPUs")
    expected = replace(status(world), admission=admission, conditions=conditions)
    world.queue = replace(world.queue, status=expected)
    assert world.step() == QueuePlan()


class TestGangs:
    """The status names the gang scheduler."""

    def test_nobody(self):
        world = QueueWorld(make_trq())
        world.settle()
        assert status(world).gang == "none"

    def test_a_missing_scheduler(self):
        world = QueueWorld(make_trq(scheduling={"scheduler": "volcano"}))
        world.settle()
        assert status(world).gang == "volcano"
        assert world.condition("Ready").status == "False"
        assert "Install Volcano" in world.condition("Ready").message
        world.delete()
        world.jobs = [a_job("run", "Running", gang=True)]
        world.settle()
        assert status(world).gang == "volcano"

    def test_a_contradicting_scheduler_name(self):
        scheduling = {"scheduler": "volcano", "gang": "kai"}
        world = QueueWorld(make_trq(scheduling=scheduling))
        world.settle()
        assert status(world).gang is None
        assert world.condition("TemplateValid").reason == "InvalidSpec"

    def test_before_discovery(self):
        world = QueueWorld(make_trq(), installed=None)
        world.settle()
        assert (status(world).gang, status(world).phase) == (None, "Active")


class TestChanges:
    """Changes apply to later jobs, and a condition says so."""

    def test_while_jobs_run(self):
        world = QueueWorld(make_trq())
        world.jobs = [a_job("runs", "Running", gang=True), a_job("waits")]
        world.settle()
        world.edit(image="other")
        world.settle()
        (event,) = world.events
        assert (event.type, event.reason) == ("Normal", "QueueChanged")
        assert event.message == (
            "The change applies to jobs and attempts that start later. Running jobs that keep the"
            " previous spec: 1."
        )

    def test_at_rest(self):
        world = QueueWorld(make_trq())
        world.settle()
        world.edit(image="other")
        world.settle()
        assert world.events == []

    def test_a_new_queue(self):
        world = QueueWorld(make_trq())
        world.jobs = [a_job("runs", "Running", gang=True)]
        world.settle()
        assert world.events == []


class TestDeletion:
    """The deletion of a queue waits for its running jobs."""

    def test_an_unused_queue_is_deleted_at_once(self):
        world = QueueWorld(make_trq())
        world.jobs = [a_job("waits"), a_job("over", "Failed"), a_job("queued", "Queued")]
        world.settle()
        world.delete()
        world.settle()
        assert world.queue is None

    def test_deletion_waits_for_running_jobs_and_names_them(self):
        world = QueueWorld(make_trq())
        world.settle()
        world.jobs = [a_job(f"run-{n}", "Running", gang=True) for n in range(7)]
        world.delete()
        world.settle()
        assert world.queue is not None
        assert status(world).phase == "Terminating"
        assert world.condition("Ready").reason == "Terminating"
        message = "Waiting for running jobs: run-0, run-1, run-2, run-3, run-4 and 2 more."
        assert world.condition("Ready").message == message
        assert world.condition("TemplateValid").status == "True", "is kept"
        assert world.reasons() == ["Terminating"]
        world.jobs = [a_job("run-0", "Succeeded")]
        world.settle()
        assert world.queue is None

    @pytest.mark.parametrize("phase", ["Queued", "Syncing", "Running", "Preempted"])
    def test_deletion_waits_for_a_job_between_two_gangs(self, phase):
        world = QueueWorld(make_trq())
        world.settle()
        between = TorchrunJobStatus(phase=phase, workers=WorkersStatus())
        world.jobs = [replace(a_job("run"), status=between)]
        world.delete()
        world.settle()
        assert world.queue is not None

    @pytest.mark.parametrize(
        ("workers", "needs_queue"),
        [
            (WorkersStatus(pending=2), True),
            (WorkersStatus(running=2), True),
            (WorkersStatus(), False),
            (None, False),
        ],
    )
    def test_deletion_waits_for_a_gang_whose_service_is_refused(self, workers, needs_queue):
        world = QueueWorld(make_trq())
        world.settle()
        pending = TorchrunJobStatus(phase="Pending", workers=workers)
        world.jobs = [replace(a_job("run"), status=pending)]
        world.delete()
        world.settle()
        assert (world.queue is not None) is needs_queue

    def test_other_finalizers_are_kept(self):
        world = QueueWorld(make_trq())
        world.settle()
        meta = world.queue.metadata
        mine, other = names.QUEUE_FINALIZER, "example.com/audit"
        meta = replace(meta, resource_version="7", finalizers=(mine, other))
        world.queue = replace(world.queue, metadata=meta)
        world.delete()
        (release,) = world.decide().applies
        assert release.merge, "an apply keeps an entry that another manager owns"
        assert release.body["metadata"]["finalizers"] == [other]
        assert release.body["metadata"]["resourceVersion"] == "7"

    def test_without_the_finalizer_nothing_is_done(self):
        queue = make_trq()
        gone = replace(queue.metadata, deletion_timestamp=datetime(2026, 1, 1, tzinfo=UTC))
        world = QueueWorld(replace(queue, metadata=gone))
        assert world.step() == QueuePlan()

    @pytest.mark.parametrize(
        ("namespace", "spec", "has_finalizer"),
        [("", {}, True), ("ml", {}, False), ("ml", {"kaiQueue": "gpu"}, True)],
    )
    def test_a_queue_does_not_keep_the_namespace_of_the_rights_to_release_it(
        self, namespace: str, spec: dict[str, str], has_finalizer: bool
    ):
        for before in ((), (names.QUEUE_FINALIZER,)):
            world = QueueWorld(make_trq(**spec))
            world.namespace = namespace
            world.queue = replace(
                world.queue, metadata=replace(world.queue.metadata, finalizers=before)
            )
            world.settle()
            assert world.queue.metadata.finalizers == (
                (names.QUEUE_FINALIZER,) if has_finalizer else ()
            )

    def test_a_refused_finalizer_is_not_repeated(self):
        world = QueueWorld(make_trq())
        world.refused = {("torchrunqueues.torchrun.ai", "gpu"): "may not patch"}
        assert world.step().applies == ()


def test_conditions_have_the_time_of_their_change():
    world = QueueWorld(make_trq())
    world.settle()
    assert world.condition("Ready").last_transition_time == START
