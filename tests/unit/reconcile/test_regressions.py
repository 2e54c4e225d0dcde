"""Bugs of earlier controllers of this kind, each named by its effect on users."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile import Conflict
from torchrun_controller.reconcile.model.phases import ROWS
from torchrun_controller.reconcile.model.plan import StatusWrite
from torchrun_controller.reconcile.spec.resolve import resolve
from world import World, make_job, make_queue

CRD = Path(__file__).parents[3] / "manifests" / "crd" / "torchrunjobs.torchrun.ai.yaml"


def running(**spec: object) -> World:
    world = World(make_job(**{"numNodes": 2, **spec}), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def job_spec(world: World) -> Any:
    """The spec of the first child Job of this world."""
    fresh = World(replace(world.job, status=TorchrunJobStatus()), world.queue)
    (created_job,) = (apply for apply in fresh.plan().applies if apply.kind is JOBS)
    return created_job.body["spec"]


def template(world: World) -> Any:
    return job_spec(world)["template"]


def trainer(world: World) -> Any:
    """The trainer container, with its environment as a mapping."""
    (container,) = template(world)["spec"]["containers"]
    return container | {"env": {v["name"]: v.get("value") for v in container["env"]}}


def fail_now(world: World) -> None:
    """The Job controller fails the Job of the gang now."""
    world.job_condition("Failed", "BackoffLimitExceeded", "the limit was reached")
    child = world.observed().gang.child_jobs[-1]
    failed = replace(child.status.conditions[-1], last_transition_time=world.now)
    changed = replace(child, status=replace(child.status, conditions=(failed,)))
    world.objects[JOBS.plural, child.metadata.name] = changed


def test_every_phase_is_in_the_enum_of_the_crd():
    """The API server refuses a status with an unknown phase. Queued was missing."""
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    reached = {row.phase for row in ROWS.values() if row.phase is not None}
    assert "Queued" in reached
    assert reached <= set(status["phase"]["enum"])


def test_one_successful_worker_is_no_success():
    world = running()
    world.pod("train-0-abcde", phase="Succeeded")
    world.settle()
    assert world.phase == "Running"
    world.all_workers("Succeeded")
    world.settle()
    assert world.phase == "Running", "the condition of the Job counts"
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"


def test_a_job_in_backoff_is_not_failed():
    world = running(reliability={"maxRestarts": 2})
    for _ in range(2):
        pod = world.workers()[0].metadata.name
        world.end_container(pod, "trainer", exit_code=1, finished_at=world.now)
        world.job_condition("Failed", "BackoffLimitExceeded", "Job has reached its limit")
        wait = world.rest().requeue_after
        assert world.phase == "Queued"
        assert world.condition("Running").status == "False"
        assert all(condition.type != "Failed" for condition in world.job.status.conditions)
        world.pass_time(seconds=wait or 0)
        world.containers_stop()
        world.settle()
        world.all_workers("Running")
        world.settle()
        assert world.phase == "Running"
    assert wait == 10, "the second failure in a row waits"


def test_a_foreign_job_is_not_adopted_by_its_name():
    world = World(make_job(numNodes=2), make_queue())
    world.conflicts = (Conflict(JOBS.resource, "train", "jobs.batch train has no owner"),)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "NameConflict")
    assert world.created == []
    world.pass_time(hours=1)
    world.settle()
    assert (world.phase, world.created) == ("Pending", [])
    world.conflicts = ()
    world.settle()
    assert world.phase == "Queued"


def test_a_ttl_does_not_run_the_training_again():
    world = running(reliability={"ttlSecondsAfterFinished": 30})
    world.job_condition("Complete")
    plan = world.step()
    assert plan.requeue_after == 30
    world.pass_time(seconds=29)
    assert world.step().requeue_after == 1
    world.pass_time(seconds=1)
    plan = world.step()
    assert [d.kind for d in plan.deletes] == [TORCHRUN_JOBS]
    assert world.gone
    assert [name for plural, name in world.created if plural == JOBS.plural] == ["train"]


def test_a_child_job_deleted_after_the_end_is_not_recreated():
    """Earlier controllers set a TTL on the child Job, which caused this."""
    world = running(numNodes=1, reliability={"ttlSecondsAfterFinished": 600})
    assert "ttlSecondsAfterFinished" not in job_spec(world)
    world.job_condition("Complete")
    world.settle()
    world.delete_child_job()
    world.settle()
    assert (world.phase, world.created) == ("Succeeded", [(JOBS.plural, "train")])


@pytest.mark.parametrize(
    ("spec", "nodes"), [({"numNodes": 2}, 2), ({"numGPUs": 12}, 2), ({"numGPUs": 4}, 1)]
)
def test_the_node_count_is_set_from_the_start(spec, nodes):
    world = World(make_job(**spec), make_queue(nodeResources={"gpus": 8}))
    world.step()
    assert world.job.status.num_nodes == nodes
    assert world.job.status.workers_status == f"0/{nodes} ready"
    assert job_spec(world)["completions"] == job_spec(world)["parallelism"] == nodes
    assert trainer(world)["env"]["PET_NNODES"] == str(nodes)


def test_a_cpu_node_does_not_run_zero_processes():
    run = resolve(make_job(numNodes=2), make_queue(nodeResources={"cpus": "500m"}))
    assert (run.nproc_per_node, run.backend, run.size.requests) == (1, "gloo", {"cpu": "500m"})
    world = World(make_job(numNodes=2), make_queue(nodeResources={"cpus": 2, "gpus": 0}))
    assert trainer(world)["env"]["PET_NPROC_PER_NODE"] == "1"


def test_overrides_of_a_job_apply():
    queue = make_queue(
        distributed={"backend": "nccl", "port": 1, "nprocPerNode": 3, "maxRestarts": 2},
        storage={"checkpoints": {"enabled": True, "size": "1Gi", "mountPath": "/a"}},
        scheduling={"priorityClassName": "low", "nodeSelector": {"a": "1", "b": "1"}},
    )
    job = make_job(
        numNodes=1,
        distributed={"backend": "gloo", "port": 2, "nprocPerNode": 4, "maxRestarts": 0},
        volumes={"checkpoints": {"size": "2Gi", "mountPath": "/b", "storageClassName": "s"}},
        scheduling={"priorityClassName": "high", "nodeSelector": {"b": "2"}},
    )
    run = resolve(job, queue)
    assert (run.backend, run.rendezvous.port, run.nproc_per_node, run.max_restarts) == (
        "gloo",
        2,
        4,
        0,
    )
    assert (run.checkpoints.size, run.checkpoints.mount_path) == ("2Gi", "/b")
    assert run.checkpoints.storage_class_name == "s"
    assert (run.priority_class_name, run.node_selector) == ("high", {"a": "1", "b": "2"})
    overrides = {"image": "mine:2", "env": [{"name": "SEED", "value": "7"}], "labels": {"run": "7"}}
    world = World(make_job(numNodes=1, workingDir="/mine", **overrides), queue)
    container = trainer(world)
    assert (container["image"], container["env"]["SEED"]) == ("mine:2", "7")
    assert container["env"]["TORCHRUN_WORKING_DIR"] == "/mine"
    assert template(world)["metadata"]["labels"]["run"] == "7"


def test_a_missing_queue_does_not_fail_the_job():
    world = World(make_job(numNodes=1), None)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "QueueNotFound")
    assert "gpu" in world.condition("QueueReady").message
    world.pass_time(hours=1000)
    world.settle()
    assert world.phase == "Pending"
    world.queue = make_queue()
    world.settle()
    assert world.phase == "Queued"
    assert world.condition("QueueReady").status == "True"


def test_a_lost_first_status_still_shows_the_workspace():
    world = World(make_job(numNodes=1), make_queue())
    world.step(99)
    assert world.job.status.conditions == ()
    world.settle()
    assert world.condition("WorkspaceReady").reason == "NoWorkspace"


def test_a_complete_job_counts_before_its_pods_are_seen_to_end():
    """Watches are independent: a Job can be Complete in the cache before its pods have succeeded."""
    world = running(numNodes=2)
    world.job_condition("Complete")
    world.settle()
    workers = world.job.status.workers
    assert (world.phase, workers.succeeded, workers.running) == ("Succeeded", 2, 0)


def test_every_worker_of_a_successful_gang_counts_as_scheduled():
    """The cache of pods may show the nodes only after the Job is Complete."""
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    assert world.condition("Scheduled").status == "True"


def test_the_root_cause_survives_a_lost_status():
    """The next gang is created before the status. Its Job has the cause of the previous failure."""
    world = running(numNodes=2)
    failed = world.workers()[0].metadata.name
    world.end_container(failed, "trainer", exit_code=3, message="boom")
    world.step(99)
    assert world.job.status.last_failure is None
    world.settle()
    failure = world.job.status.last_failure
    assert (failure.exit_code, "boom" in failure.message) == (3, True)
    assert [attempt.number for attempt in world.job.status.attempts] == [0]


def test_a_failed_job_waits_briefly_for_pods_that_seem_to_run():
    """Watches are independent: the Job can fail in the cache before its pods, which have the cause."""
    world = running(numNodes=2)
    fail_now(world)
    assert 0 < world.settle().requeue_after <= 70
    assert world.phase == "Running"
    world.end_container(world.workers()[1].metadata.name, "trainer", exit_code=3, message="boom")
    world.settle()
    assert world.job.status.last_failure.exit_code == 3


def test_a_failed_job_waits_briefly_for_pods_that_were_never_seen():
    """A broken watch hides all pods. Their failure is no disruption."""
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    fail_now(world)
    hidden = world.workers()[0]
    world.vanish(hidden.metadata.name)
    assert 0 < world.settle().requeue_after <= 70
    assert world.job.status.attempt == 0
    world.objects[PODS.plural, hidden.metadata.name] = hidden
    world.end_container(hidden.metadata.name, "trainer", exit_code=3, message="boom")
    world.settle()
    assert world.job.status.last_failure.exit_code == 3
    assert (world.job.status.restarts, world.job.status.disruptions) == (1, 0)


def test_a_failed_job_does_not_wait_for_deleted_pods():
    world = running(numNodes=1)
    fail_now(world)
    world.vanish(world.workers()[0].metadata.name)
    world.settle()
    assert (world.job.status.restarts, world.job.status.disruptions) == (0, 1)


def test_a_suspension_is_recorded_before_the_gang_is_deleted():
    """No other object shows how the attempt ended."""
    world = running(numNodes=2)
    world.spec(suspend=True)
    plan = world.step(99)
    assert plan.writes[0] == StatusWrite(
        status=plan.status, events=plan.events, before_deletes=True
    )
    assert plan.deletes
    assert world.observed().gang.child_jobs, "a crash before the status has deleted nothing"
    world.settle()
    assert [attempt.reason for attempt in world.job.status.attempts] == ["Suspended"]


def test_a_gang_after_one_with_unseen_pods_waits_at_its_gate():
    """The cache can show that the Job is gone before it shows its pods, which may be training."""
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    del world.objects[JOBS.plural, "train"]
    for pod in list(world.workers()) + list(world.observed().gang.stale_pods):
        world.vanish(pod.metadata.name)
    world.pass_backoff()
    created_job = next(apply for apply in world.step().applies if apply.kind is JOBS)
    assert "torchrun.ai/start" not in str(created_job.body)
    world.settle()
    assert all(pod.metadata.annotations.start == "1" for pod in world.leaders())
