"""A gang with a separate head: two child Jobs with one lifecycle."""

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_controller.reconcile import Conflict
from torchrun_controller.reconcile.gang import fence
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import delete_job, index_of
from world import World, make_job, make_queue

HEAD = {"nodeResources": {"gpus": 0, "cpus": 2, "memory": "8Gi"}}
QUEUE = {"nodeResources": {"gpus": 8, "cpus": 96, "memory": "512Gi"}}


@pytest.fixture
def world():
    return World(make_job(numNodes=3, head=HEAD), make_queue(**QUEUE))


def jobs(world):
    return sorted(name for plural, name in world.objects if plural == JOBS.plural)


def runs(world):
    world.settle_twice()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"


def test_the_gang_has_two_jobs_and_one_count(world):
    plan = world.step()
    assert [a.name for a in plan.applies] == ["train-gang-uid-trai", "train", "train-w", "train"]
    head = world.observed().gang.child_jobs[-1]
    assert (head_and_workers.nodes_of(head), head.spec.completions) == (3, 1)
    status = world.job.status
    assert (status.num_nodes, status.gpus, status.workers.pending) == (3, 16, 3)
    assert [index_of(pod) for pod in world.workers()] == [0, 1, 2]


def test_each_role_requests_its_own(world):
    made = {a.name: a.body["spec"]["template"] for a in world.step().applies if a.kind is JOBS}
    trainers = {name: made[name]["spec"]["containers"][0] for name in made}
    assert trainers["train"]["resources"]["requests"] == {"cpu": "2", "memory": "8Gi"}
    assert trainers["train-w"]["resources"]["requests"]["nvidia.com/gpu"] == "8"
    variables = {name: {v["name"]: v.get("value") for v in trainers[name]["env"]} for name in made}
    assert [variables[name]["TORCHRUN_ROLE"] for name in ("train", "train-w")] == ["head", "worker"]
    assert [variables[name]["PET_NPROC_PER_NODE"] for name in ("train", "train-w")] == ["1", "8"]
    assert {variables[name]["PET_NNODES"] for name in made} == {"3"}
    assert {variables[name]["PET_MASTER_ADDR"] for name in made} == {"train-0.train.ml.svc"}


def test_a_head_may_run_elsewhere_than_the_workers():
    gpu, night = ({"key": key, "operator": "Exists"} for key in ("gpu", "night"))
    scheduling = {"nodeSelector": {"pool": "gpu"}, "tolerations": [gpu], "affinity": {"gpu": {}}}
    container = {"name": "trainer", "image": "head:1"}
    spec = {"nodeSelector": {"pool": "cpu"}, "tolerations": [night], "containers": [container]}
    head = {**HEAD, "podTemplate": {"spec": {**spec, "affinity": {"gpu": None, "cpu": {}}}}}
    job, queue = make_job(numNodes=3, head=head), make_queue(**QUEUE, scheduling=scheduling)
    applies = (a for a in World(job, queue).step().applies if a.kind is JOBS)
    made = {a.name: a.body["spec"]["template"]["spec"] for a in applies}
    assert made["train-w"]["nodeSelector"] == {"pool": "gpu"}
    assert made["train-w"]["tolerations"] == [gpu]
    assert made["train"]["nodeSelector"] == {"pool": "cpu"}
    assert made["train"]["tolerations"] == [night, gpu]
    assert made["train"]["affinity"] == {"cpu": {}}
    assert made["train"]["containers"][0]["image"] == "head:1"
    assert made["train-w"]["containers"][0]["image"] == queue.spec.image


def test_no_launcher_starts_before_both_jobs_exist(world):
    world.step()
    started = [pod.metadata.annotations.start for pod in world.workers()]
    assert started == ["", "", ""]
    world.settle_twice()
    assert [pod.metadata.annotations.start for pod in world.workers()] == ["0", "", ""]


def test_a_crash_between_the_two_jobs_leaves_workers_that_never_start(world):
    world.step(writes=3)
    assert jobs(world) == ["train-w"]
    plan = world.step()
    assert [d.name for d in plan.deletes] == ["train-w"]
    assert jobs(world) == ["train-r1", "train-r1-w"]
    world.settle()
    assert {pod.metadata.annotations.start for pod in world.workers()} == {""}, "old pods still end"
    world.containers_stop()
    world.settle_twice()
    assert [pod.metadata.annotations.start for pod in world.workers()] == ["1", "", ""]
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 0)


def test_unseen_workers_keep_their_attempt_number(world):
    world.step(writes=3)
    world.vanish(*(name for plural, name in world.objects if plural == PODS.plural))
    world.step()
    assert jobs(world) == ["train-r1", "train-r1-w"]


def test_workers_beside_a_head_belong_to_this_job(world):
    made = replace(world.job.metadata, creation_timestamp=world.now)
    world.job = replace(world.job, metadata=made)
    world.step()
    for pod in world.workers():
        meta = replace(pod.metadata, creation_timestamp=world.now)
        assert not fence.of_earlier_job(
            world.job, world.observed().gang, replace(pod, metadata=meta)
        )


def test_a_suspension_waits_for_workers_without_a_head(world):
    world.step(writes=3)
    world.spec(suspend=True)
    world.settle()
    assert (jobs(world), world.job.status.reason) == ([], "Suspending")
    world.containers_stop()
    world.settle()
    assert world.phase == "Suspended"


@pytest.mark.parametrize("gone", ["train-w", "train"])
def test_without_one_job_the_other_is_deleted(world, gone):
    runs(world)
    child = world.objects[JOBS.plural, gone]
    world._delete(delete_job(child))
    world.settle()
    assert jobs(world) == ["train-r1", "train-r1-w"]
    status = world.job.status
    assert (status.attempt, status.restarts, status.disruptions) == (1, 0, 1)


def test_half_of_an_unrecorded_gang_stays_until_it_is_recorded(world):
    world.step(writes=99)
    world._delete(delete_job(world.objects[JOBS.plural, "train-w"]))
    world.containers_stop()
    plan = world.plan()
    assert not plan.deletes
    assert [attempt.reason for attempt in plan.status.attempts] == ["JobDeleted"]
    assert PODS not in {apply.kind for apply in plan.applies}, (
        "no start annotation for the head alone"
    )
    world.settle()
    assert "train-r1" in jobs(world)


def test_a_terminating_job_is_no_gang(world):
    runs(world)
    for name in ("train-w", "train"):
        key = (JOBS.plural, name)
        kept = child = world.objects[key]
        meta = replace(child.metadata, deletion_timestamp=world.now)
        world.objects[key] = replace(child, metadata=meta)
        assert world.plan().status.message.endswith(f". Job {name} was deleted.")
        world.objects[key] = kept


@pytest.mark.parametrize("failed", [0, 2])
def test_a_failure_of_either_role_ends_both(world, failed):
    runs(world)
    world.pod(world.workers()[failed].metadata.name, phase="Failed")
    world.pass_backoff()
    world.step()
    old_pods = [pod for pod in world.observed().gang.stale_pods if pod.status.phase == "Running"]
    assert [pod.metadata.terminating for pod in old_pods] == [True, True]
    assert jobs(world) == ["train", "train-r1", "train-r1-w", "train-w"]
    world.containers_stop()
    runs(world)
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 1)


def test_remaining_pods_after_a_crash_are_deleted_later(world):
    runs(world)
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.step(writes=3)
    world.settle()
    left = [p for p in world.observed().gang.stale_pods if p.metadata.deletion_timestamp is None]
    assert not left, [p.metadata.name for p in left]


def test_workers_whose_pods_vanished_have_failed(world):
    runs(world)
    world.vanish(*(pod.metadata.name for pod in world.workers()[1:]))
    child = world.objects[JOBS.plural, "train-w"]
    failed = Condition(type="Failed", status="True", last_transition_time=world.now)
    status = replace(child.status, conditions=(failed,))
    world.objects[JOBS.plural, "train-w"] = replace(child, status=status)
    world.step()
    assert world.job.status.attempts[-1].message == "Job train-w failed."
    assert world.job.status.disruptions == 1


def test_only_the_head_decides_on_success(world):
    runs(world)
    head, *workers = world.workers()
    world.pod(head.metadata.name, phase="Succeeded")
    world.pod(workers[0].metadata.name, phase="Failed")
    world.settle()
    assert world.phase == "Running", "its Job has no condition yet"
    world.job_condition("Complete")
    world.settle()
    status = world.job.status
    assert (world.phase, status.message) == ("Succeeded", "The head succeeded.")
    assert (status.workers.succeeded, status.workers.failed, status.workers.running) == (1, 1, 1)


def test_workers_end_by_themselves_or_a_grace_period_after_the_head(world):
    runs(world)
    head, *workers = world.workers()
    world.pod(head.metadata.name, phase="Succeeded")
    world.job_condition("Complete")
    assert world.settle().requeue_after == 30
    world.pod(workers[0].metadata.name, phase="Succeeded")
    world.settle()
    assert (world.job.status.workers.succeeded, world.job.status.workers.running) == (2, 1)
    world.pass_time(seconds=30)
    assert [d.name for d in world.step().deletes] == [workers[1].metadata.name]
    world.pod(workers[1].metadata.name, phase="Failed")
    world.settle()
    status = world.job.status.workers
    assert (status.succeeded, status.failed, status.running) == (2, 0, 0), (
        "ended, but not deleted yet"
    )
    world.containers_stop()
    assert world.settle().requeue_after is None
    assert (world.job.status.workers.succeeded, world.job.status.workers.running) == (2, 0)


def test_both_jobs_of_old_attempts_are_forgotten(world):
    for attempt in range(7):
        runs(world)
        world.suspend()
        assert jobs(world) == [], attempt
        world.spec(suspend=False)
    world.settle_twice()
    assert len(jobs(world)) == 2


def test_a_taken_name_is_skipped_for_both_jobs(world):
    runs(world)
    world.conflicts = (Conflict(JOBS.resource, names.workers_job("train", 1), "another's"),)
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.settle()
    assert jobs(world) == ["train", "train-r2", "train-r2-w", "train-w"]


def test_refused_pods_of_either_job_are_reported(world):
    world.settle_twice()
    for pod in world.workers()[1:]:
        world.vanish(pod.metadata.name)
    world.warn(JOBS, "train-w", "FailedCreate", "Error creating: no such service account")
    world.settle()
    assert world.job.status.message.startswith("1 of 3 pods is created. ")


@pytest.mark.parametrize(
    ("spec", "queue", "message"),
    [
        ({"numNodes": 1}, {}, "spec.head requires spec.numNodes of at least 2"),
        ({"numGPUs": 16}, {}, "spec.head requires spec.numNodes of at least 2"),
        (
            {"numNodes": 2, "elastic": {"minNodes": 1, "maxNodes": 4}},
            {},
            "spec.head conflicts with spec.elastic",
        ),
        (
            {"numNodes": 2},
            {"scheduling": {"gang": "kueue"}},
            "conflicts with scheduling.gang kueue",
        ),
        (
            {"numNodes": 2, "head": {"nodeResources": {"cpus": 97}}},
            {},
            "spec.head.nodeResources.cpus is 97, but nodeResources.cpus of the queue is 96.",
        ),
    ],
)
def test_contradictions_of_a_head(spec, queue, message):
    world = World(make_job(**{"head": HEAD, **spec}), make_queue(**QUEUE, **queue))
    world.settle()
    assert world.job.status.reason == "InvalidSpec"
    assert message in world.job.status.message
