"""The life of a job: every phase in order, and the message of each wait."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, SECRETS, SERVICES
from torchrun_api.kinds.shared import Distributed
from torchrun_controller.reconcile import Conflict
from torchrun_controller.reconcile.model.observed import RefusedWrites, Rejection
from world import START, ZIP, World, make_job, make_queue


def test_a_job_without_a_workspace_succeeds():
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    assert world.created == [(JOBS.plural, "train"), (SERVICES.plural, "train")]
    assert world.phase == "Queued"
    world.all_workers("Running")
    world.settle()
    assert (world.phase, world.job.status.start_time) == ("Running", START)
    world.all_workers("Succeeded")
    world.settle()
    assert world.phase == "Running", "successful pods are no condition of the Job"
    world.job_condition("Complete")
    world.pass_time(seconds=7)
    world.settle()
    assert world.phase == "Succeeded"
    assert (world.job.status.completion_time - START).total_seconds() == 7
    assert world.condition("Complete").status == "True"
    assert world.condition("Running").status == "False"


def test_a_gang_of_one_needs_no_service():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    assert world.created == [(JOBS.plural, "train")]


def test_a_job_needs_four_writes_until_its_gang_exists():
    world = World(make_job(numNodes=2), make_queue())
    plan = world.step()
    assert [a.kind for a in plan.applies] == [SECRETS, JOBS, SERVICES]
    assert plan.status is not None
    assert world.step().status is None


def test_a_deleted_queue_does_not_affect_a_running_gang():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    world.all_workers("Running")
    world.queue = None
    world.settle()
    assert world.phase == "Running"


@pytest.mark.parametrize(
    ("spec", "queue", "word"),
    [
        ({"numGPUs": 5}, {"nodeResources": {"gpus": 4}}, "4 or 6"),
        ({"numGPUs": 4}, {}, "nodeResources.gpus of the queue is 0"),
        ({"numNodes": 1, "numGPUs": 1}, {}, "exactly one"),
        ({}, {}, "exactly one"),
        ({"numNodes": 1}, {"image": None}, "spec.image"),
        (
            {"numNodes": 1, "volumes": ZIP},
            {"storage": {"workspace": {"enabled": False}}},
            "workspace.enabled",
        ),
        ({"numNodes": 1}, {"nodeResources": {"memory": "12Gigs"}}, "12Gigs"),
        (
            {"numNodes": 1, "elastic": {"minNodes": 1, "maxNodes": 2}},
            {"distributed": {"rdzvBackend": "static"}},
            "spec.elastic conflicts with distributed.rdzvBackend static of TorchrunQueue gpu",
        ),
        (
            {"numNodes": 1, "reliability": {"maxRestarts": 2}},
            {"reliability": {"restartPolicy": "Never"}},
            "maxRestarts 2 conflicts with reliability.restartPolicy Never of TorchrunQueue gpu",
        ),
        (
            {
                "numNodes": 1,
                "reliability": {
                    "rules": [
                        {"action": "fail", "exitCodes": [1]},
                        {"action": "ignore", "exitCodes": [2]},
                    ]
                },
            },
            {"reliability": {"restartPolicy": "Never"}},
            "spec.reliability.rules[1].action ignore conflicts with reliability.restartPolicy Never",
        ),
        ({"numNodes": 1, "env": [{"name": "PET_NNODES", "value": "3"}]}, {}, "PET_NNODES"),
        (
            {"numGPUs": 24},
            {"nodeResources": {"gpus": 8}, "limits": {"maxNodesPerJob": 2}},
            "3 nodes, but limits.maxNodesPerJob of TorchrunQueue gpu is 2.",
        ),
        (
            {"numNodes": 1, "priority": 1000000},
            {"limits": {"maxPriority": 100}},
            "spec.priority is 1000000, but limits.maxPriority of TorchrunQueue gpu is 100.",
        ),
    ],
)
def test_an_invalid_spec_names_field_and_value(spec, queue, word):
    world = World(make_job(**spec), make_queue(**queue))
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "InvalidSpec")
    assert word in world.job.status.message
    assert world.created == []


@pytest.mark.parametrize(
    "reliability",
    [
        {"maxRestarts": 2, "restartPolicy": "OnFailure"},
        {"maxRestarts": 0},
        {"rules": [{"action": "fail", "exitCodes": [1]}]},
    ],
)
def test_a_queue_without_restarts_refuses_only_jobs_that_request_them(reliability):
    never = make_queue(reliability={"restartPolicy": "Never"})
    world = World(make_job(numNodes=1, reliability=reliability), never)
    world.settle()
    assert world.phase == "Queued"


def test_an_empty_command_is_refused():
    job = make_job(numNodes=1)
    world = World(replace(job, spec=replace(job.spec, command="")), make_queue())
    world.settle()
    assert "spec.command" in world.job.status.message


def test_an_invalid_spec_beyond_the_schema_affects_its_job_only():
    job = replace(make_job(numNodes=1), invalid="Expected `int`, got `str` - at `$.spec.numNodes`")
    world = World(job, make_queue())
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "InvalidSpec")
    assert "$.spec.numNodes" in world.job.status.message


def test_an_invalid_queue_is_named():
    world = World(make_job(numNodes=1), replace(make_queue(), invalid="Expected `int`"))
    world.settle()
    assert "TorchrunQueue gpu" in world.job.status.message


def test_a_refused_object_has_the_message_of_the_server():
    from torchrun_controller.reconcile import reconcile
    from world import DEFAULTS

    world = World(make_job(numNodes=1), make_queue())
    rejection = Rejection(
        JOBS.resource, "train", "spec.template.spec.containers[0].image: Required"
    )
    plan = reconcile(
        replace(world.observed(), refused=RefusedWrites(rejections=(rejection,))),
        world.now,
        DEFAULTS,
    )
    assert plan.applies == ()
    assert plan.status.reason == "Rejected"
    assert "containers[0].image" in plan.status.message


@pytest.mark.parametrize("lost", ["before the Job is gone", "after"])
def test_a_child_job_deleted_by_hand_is_a_new_attempt(lost):
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    if lost != "after":
        child = world.observed().gang.child_jobs[-1]
        world.objects[JOBS.plural, "train"] = replace(
            child, metadata=replace(child.metadata, deletion_timestamp=world.now)
        )
        for pod in world.workers():
            world.pod(pod.metadata.name, phase="Pending")
        world.settle()
        assert (world.phase, world.job.status.attempts[0].reason) == ("Queued", "JobDeleted")
        world.vanish("train-0-abcde", "train-1-abcde")
        del world.objects[JOBS.plural, "train"]
    else:
        world.delete_child_job()
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Queued", 1)
    assert world.created[-1] == (JOBS.plural, "train-r1")


def test_an_attempt_whose_name_is_taken_is_skipped():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    world.delete_child_job()
    world.conflicts = (Conflict(JOBS.resource, "train-r1", "foreign"),)
    world.settle()
    assert world.created[-1] == (JOBS.plural, "train-r2")
    assert world.job.status.attempt == 2


def test_a_lost_service_is_recreated_for_a_running_gang():
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    del world.objects[SERVICES.plural, "train"]
    world.settle()
    assert world.created[-1] == (SERVICES.plural, "train")
    del world.objects[SERVICES.plural, "train"]
    world.job_condition("Complete")
    world.settle()
    assert world.created.count((SERVICES.plural, "train")) == 2


def test_an_image_pull_failure_is_reported():
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.container_waits("train-1-abcde", "ImagePullBackOff", 'Back-off pulling image "nope"')
    plan = world.step()
    assert (world.phase, world.job.status.reason) == ("Queued", "ImagePullFailed")
    assert "nope" in world.job.status.message
    assert plan.events[0].type == "Warning"


def test_a_normal_start_is_no_problem():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    placed = Condition(type="PodScheduled", status="True")
    world.pod("train-0-abcde", conditions=(placed,))
    world.container_waits("train-0-abcde", "ContainerCreating")
    world.settle()
    assert world.job.status.reason == "WorkersStarting"
    assert world.condition("Scheduled").status == "True"


def test_an_unschedulable_gang_has_the_message_of_the_scheduler():
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.pod("train-0-abcde", phase="Running")
    world.not_placed("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", 1)
    world.settle()
    assert world.job.status.reason == "Unschedulable"
    message = "0 of 3 nodes are available: 3 lack nvidia.com/gpu."
    assert world.job.status.message == (
        f"1 of 2 pods is scheduled. Pod train-1-abcde (index 1): {message}"
    )
    assert (world.condition("Scheduled").status, world.condition("Scheduled").reason) == (
        "False",
        "Unschedulable",
    )
    assert message in world.condition("Scheduled").message


def test_a_child_job_suspended_by_others_is_reported():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    child = world.objects[JOBS.plural, "train"]
    world.objects[JOBS.plural, "train"] = replace(child, spec=replace(child.spec, suspend=True))
    world.settle()
    assert world.job.status.reason == "JobSuspended"


def test_a_deleted_job_is_left_to_garbage_collection():
    job = make_job(numNodes=1)
    world = World(replace(job, metadata=replace(job.metadata, deletion_timestamp=START)), None)
    plan = world.step()
    assert (plan.applies, plan.status, plan.events) == ((), None, ())


def test_fields_that_are_not_honoured_yet_are_named():
    world = World(make_job(numNodes=1), make_queue(parentKaiQueue="gpu-training"))
    world.settle()
    assert "parentKaiQueue" in world.condition("NotYetSupported").message
    world.queue = None
    world.settle()
    assert all(c.type != "NotYetSupported" for c in world.job.status.conditions)


def test_etcd_without_an_endpoint_falls_back_with_a_condition():
    world = World(make_job(numNodes=2, distributed={"rdzvBackend": "etcd-v2"}), make_queue())
    plan = world.step()
    assert [event.reason for event in plan.events] == ["RendezvousFallback"]
    assert "static" in plan.events[0].message


def test_a_job_reports_etcd_until_it_is_used():
    asked = {"rdzvBackend": "etcd-v2"}
    job = make_job(numNodes=2, distributed=asked, reliability={"maxRestarts": 1})
    world = World(job, make_queue())
    for phase in ("Running", "Failed", "Running", "Succeeded"):
        world.settle()
        condition = world.condition("NotYetSupported")
        assert (condition.status, condition.reason) == ("True", "FieldsNotHonored")
        assert "distributed.rdzvBackend is etcd-v2" in condition.message
        assert "static is used" in condition.message
        world.all_workers(phase)
    world.spec(distributed=Distributed(rdzv_backend="etcd-v2", rdzv_endpoint="etcd:2379"))
    world.settle()
    assert all(c.type != "NotYetSupported" for c in world.job.status.conditions)


def test_an_existing_gang_without_a_status_is_used():
    world = World(make_job(numNodes=2), make_queue(nodeResources={"gpus": 8}))
    plan = world.plan()
    for apply in plan.applies:
        world._create(apply)
    world.settle()
    assert world.created.count((JOBS.plural, "train")) == 1
    assert (world.job.status.num_nodes, world.job.status.gpus) == (2, 16)
    assert world.condition("QueueReady").status == "True"


def test_a_gang_continues_after_an_incompatible_change_of_its_queue():
    world = World(make_job(numGPUs=8), make_queue(nodeResources={"gpus": 8}))
    for apply in world.plan().applies:
        world._create(apply)
    world.queue = make_queue()
    world.settle()
    assert world.phase == "Queued"


def test_each_change_is_one_event():
    world = World(make_job(numNodes=1), None)
    assert [e.reason for e in world.step().events] == ["QueueNotFound"]
    assert world.step().events == ()


def test_conditions_keep_the_time_of_their_last_change():
    world = World(make_job(numNodes=1), None)
    world.settle()
    world.pass_time(minutes=1)
    world.queue = make_queue()
    world.settle()
    assert world.condition("QueueReady").last_transition_time == world.now
    world.pass_time(minutes=1)
    world.all_workers("Running")
    world.settle()
    since = world.condition("QueueReady").last_transition_time
    assert (world.now - since).total_seconds() == 60


def test_conditions_have_the_generation_of_the_spec_that_they_describe():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    world.spec(priority=5)
    world.settle()
    generation = world.job.metadata.generation
    assert world.job.status.observed_generation == generation
    assert {c.observed_generation for c in world.job.status.conditions} == {generation}


def test_the_order_in_which_the_server_keeps_conditions_does_not_matter():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    status = world.job.status
    world.job = replace(world.job, status=replace(status, conditions=status.conditions[::-1]))
    assert world.plan().status is None


def test_a_terminating_queue_accepts_no_new_jobs():
    going = make_queue()
    going = replace(going, metadata=replace(going.metadata, deletion_timestamp=START))
    late = World(make_job(numNodes=1), going)
    late.settle()
    assert (late.phase, late.job.status.reason) == ("Pending", "QueueTerminating")
    assert not late.created
    old = World(make_job(numNodes=1), make_queue())
    old.settle()
    old.all_workers("Running")
    old.settle()
    old.queue = going
    old.pod(old.workers()[0].metadata.name, phase="Failed")
    old.settle()
    assert len(old.gangs) == 2, "a restart is no new job"


def test_refused_changes_of_pods_and_the_job_do_not_delay_the_gang_after_them():
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.rejections = (
        Rejection("pods", "train-0-abcde", "denied"),
        Rejection("jobs.batch", "train", "denied"),
    )
    world.all_workers("Failed")
    world.settle()
    assert len(world.gangs) == 2
