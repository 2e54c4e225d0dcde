"""Each phase that a step declares occurs, in one short history for each step and phase."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import CLAIMS, JOBS, SERVICES
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.job import steps
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.job.decisions import Decision
from torchrun_controller.reconcile.job.steps import Step
from torchrun_controller.reconcile.model.observed import Conflict, Installed
from torchrun_controller.reconcile.model.phases import ROWS
from torchrun_controller.reconcile.model.plan import Plan
from torchrun_controller.reconcile.schedulers.kai import KAI_POD_GROUPS
from unit.reconcile import losing
from unit.reconcile.job.test_dependencies import Family, job
from world import ZIP, World, make_job, make_queue

QUOTA: JsonObject = {"quota": {"nodes": 4}}
Pair = tuple[str, str]


def submitted(queue: JsonObject | None = None, **spec: object) -> World:
    world = World(make_job(**{"numNodes": 1, **spec}), make_queue(**(queue or {})))
    world.settle()
    return world


def running(queue: JsonObject | None = None, **spec: object) -> World:
    world = submitted(queue, **spec)
    world.all_workers("Running")
    world.settle()
    return world


def succeeded() -> World:
    world = running()
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    return world


def past_the_deadline() -> World:
    world = running(reliability={"activeDeadlineSeconds": 60})
    world.pass_time(seconds=60)
    return world


def with_a_deleted_gang() -> World:
    world = running(reliability={"restartPolicy": "Never"})
    world.delete_child_job()
    return world


def admitted_and_preempted() -> World:
    world = submitted(QUOTA)
    world.admit(1)
    world.settle()
    world.preempt()
    return world


def preempted_and_released() -> World:
    world = admitted_and_preempted()
    world.settle()
    world.containers_stop()
    world.settle()
    world.admission(False, "Requeued", "waits for its turn again", None)
    return world


def failed(max_restarts: int) -> World:
    world = running(reliability={"maxRestarts": max_restarts})
    world.all_workers("Failed")
    return world


def failed_twice() -> World:
    world = failed(max_restarts=2)
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.all_workers("Failed")
    return world


def suspended_by_others() -> World:
    world = submitted()
    child = world.objects[JOBS.plural, "train"]
    world.objects[JOBS.plural, "train"] = replace(child, spec=replace(child.spec, suspend=True))
    return world


def invalid() -> World:
    return World(replace(make_job(numNodes=1), invalid="Expected `int`"), make_queue())


def after(*parents: TorchrunJob) -> World:
    world = Family("prep")
    world.know(*parents)
    return world


def without_a_scheduler() -> World:
    world = World(make_job(numNodes=1), make_queue(scheduling={"gang": "volcano"}))
    world.installed = Installed()
    return world


def without_a_topology() -> World:
    """KAI is installed, but has no Topology for a job that names one."""
    world = World(
        make_job(numNodes=2, scheduling={"topology": {"required": "rack"}}),
        make_queue(scheduling={"gang": "kai"}),
    )
    resource = (KAI_POD_GROUPS.api_version, KAI_POD_GROUPS.plural)
    world.installed = Installed(resources=frozenset((resource,)))
    return world


def past_the_sync_timeout() -> World:
    world = submitted(volumes=ZIP, reliability={"syncTimeoutSeconds": 60})
    world.pass_time(seconds=60)
    return world


def blocked_by(resource: str, name: str, **spec: object) -> World:
    world = World(make_job(**{"numNodes": 2, **spec}), make_queue())
    world.conflicts = (Conflict(resource, name, "it belongs to another"),)
    return world


def without_its_service() -> World:
    """A new gang whose Service was refused, and whose creation no status records."""
    world = submitted(numNodes=2)
    del world.objects[SERVICES.plural, "train"]
    world.job = replace(world.job, status=TorchrunJobStatus())
    world.conflicts = (Conflict(SERVICES.resource, "train", "it belongs to another"),)
    return world


def with_a_gang_that_cannot_start() -> World:
    world = submitted(QUOTA)
    world.admit(1)
    world.settle()
    for pod in world.workers():
        world.container_waits(pod.metadata.name, "ErrImagePull", "not found")
    world.pass_time(hours=1)
    return world


def with_terminating_checkpoints() -> World:
    world = running({"storage": {"checkpoints": {"size": "1Gi"}}}, reliability={"maxRestarts": 5})
    key = (CLAIMS.plural, "train-checkpoints")
    meta = replace(world.objects[key].metadata, deletion_timestamp=world.now)
    world.objects[key] = replace(world.objects[key], metadata=meta)
    world.all_workers("Failed")
    return world


def with_lost_nodes() -> World:
    world = losing.running(nodes=3)
    for node in ("node-1", "node-2"):
        world.node(node, False)
    world.pass_time(seconds=40)
    world.settle()
    world.containers_stop()
    return world


def with_unread_nodes() -> World:
    world = failed(max_restarts=1)
    world.nodes_awaited = True
    return world


HISTORIES: dict[Pair, Callable[[], World]] = {
    ("gang_succeeded", "Succeeded"): succeeded,
    ("deadline_exceeded", "TimedOut"): past_the_deadline,
    ("gang_deleted", "Failed"): with_a_deleted_gang,
    ("suspended", "Suspended"): lambda: submitted(suspend=True),
    ("preempted", "Preempted"): admitted_and_preempted,
    ("start_timed_out", "Queued"): with_a_gang_that_cannot_start,
    ("gang_failed", "Failed"): lambda: failed(max_restarts=0),
    ("backing_off", "Queued"): failed_twice,
    ("service_refused", "Pending"): without_its_service,
    ("gang_exists", "Queued"): submitted,
    ("gang_exists", "Running"): running,
    ("gang_exists", "Preempted"): suspended_by_others,
    ("job_invalid", "Pending"): invalid,
    ("queue_missing", "Pending"): lambda: World(make_job(numNodes=1), None),
    ("spec_invalid", "Pending"): lambda: submitted(numNodes=None, numGPUs=4),
    ("dependency_failed", "Failed"): lambda: after(job("prep", phase="Failed")),
    ("dependency_failed", "Pending"): lambda: after(job("prep", "train")),
    ("scheduler_missing", "Pending"): without_a_scheduler,
    ("workspace_not_ready", "Syncing"): lambda: submitted(volumes=ZIP),
    ("workspace_not_ready", "Failed"): past_the_sync_timeout,
    ("workspace_not_ready", "Pending"): lambda: blocked_by(
        CLAIMS.resource, "train-workspace", volumes=ZIP
    ),
    ("dependencies_not_met", "Queued"): lambda: after(job("prep", phase="Running")),
    ("checkpoints_terminating", "Queued"): with_terminating_checkpoints,
    ("gang_refused", "Pending"): lambda: blocked_by(SERVICES.resource, "train"),
    ("not_admitted", "Queued"): lambda: submitted(QUOTA),
    ("not_admitted", "Preempted"): preempted_and_released,
    ("nodes_not_read", "Queued"): with_unread_nodes,
    ("unfenced_not_recorded", "Queued"): with_lost_nodes,
    ("create_gang", "Queued"): submitted,
    ("create_gang", "Pending"): without_a_topology,
}


def recorded(step: Step, pairs: set[Pair]) -> Step:
    """The step, which adds its name and phase to `pairs` whenever it decides."""

    def decide(assessment: Assessment) -> Decision | Plan | None:
        decision = step.decide(assessment)
        if isinstance(decision, Decision):
            pairs.add((name, ROWS[decision.state].phase or ""))
        return decision

    name = step.decide.__name__
    return Step(decide, step.leads_to)


DECLARED = [(step.decide.__name__, phase) for step in steps.STEPS for phase in step.leads_to]


@pytest.mark.parametrize("pair", DECLARED, ids="-".join)
def test_a_declared_phase_occurs(pair, monkeypatch):
    pairs: set[Pair] = set()
    monkeypatch.setattr(steps, "STEPS", tuple(recorded(step, pairs) for step in steps.STEPS))
    HISTORIES[pair]().settle()
    assert pair in pairs


def test_no_history_has_an_undeclared_phase():
    assert set(HISTORIES) == set(DECLARED)


def test_a_gang_that_cannot_be_built_is_invalid_whatever_else_is_refused():
    world = without_a_topology()
    world.conflicts = (Conflict(SERVICES.resource, "train", "it belongs to another"),)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "InvalidSpec")
    assert "requires a KAI Topology" in world.job.status.message
