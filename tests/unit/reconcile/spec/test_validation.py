"""Rules refuse new jobs and edits. They do not touch what runs, its restarts, a reload or a queue."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from queue_world import QueueWorld
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.requests import requests_of
from torchrun_controller.reconcile.spec.resolve import resolve
from torchrun_controller.reconcile.spec.validation import validate
from unit.reconcile.failing import disrupt, fail
from unit.reconcile.workspace.reloading import annotate, revision_complete, running
from world import World, make_job, make_queue

GPU_NODE = {"nodeResources": {"gpus": 8, "cpus": 96, "memory": "512Gi"}}
TRAINER = {"spec": {"containers": [{"name": "trainer", "image": "template"}]}}


@pytest.mark.parametrize(
    ("spec", "queue", "message"),
    [
        ({"nodeResources": {"gpus": 9}}, GPU_NODE, "spec.nodeResources.gpus is 9, but"),
        ({"nodeResources": {"cpus": "96001m"}}, GPU_NODE, "nodeResources.cpus of the queue is 96."),
        ({"nodeResources": {"memory": "1Ti"}}, GPU_NODE, "memory of the queue is 512Gi. Request"),
        ({"nodeResources": {"memory": "9e99"}}, {}, r"larger than 2\^63-1"),
        ({"numNodes": None, "numGPUs": 40_000}, {"nodeResources": {"gpus": 1}}, "40000 nodes"),
        (
            {"podTemplate": {"spec": {"containers": [{"name": "trainer"}]}}},
            {"image": None},
            "no default image",
        ),
        (
            {"podTemplate": {"spec": {"initContainers": [{"name": "a", "resources": 1}]}}},
            {},
            "podTemplate: the resources of the pods are invalid",
        ),
        (
            {"podTemplate": {"spec": {"overhead": {f"x{n}.io/r": 0 for n in range(65)}}}},
            {},
            "a pod requests 65 different resources",
        ),
        (
            {"podTemplate": {"spec": {"overhead": {"cpu": "-100"}}}},
            {},
            "podTemplate: the resources of the pods are invalid: '-100' is not a quantity",
        ),
        ({"reliability": {"terminationGracePeriodSeconds": 3601}}, {}, "Seconds of .* is 3600"),
        ({"podTemplate": {"spec": {"terminationGracePeriodSeconds": 31536000}}}, {}, "is 3600"),
        (
            {"reliability": {"terminationGracePeriodSeconds": 61}},
            {"limits": {"maxTerminationGracePeriodSeconds": 60}},
            "is 61 s, but limits.maxTerminationGracePeriodSeconds of TorchrunQueue gpu is 60",
        ),
        (
            {"reliability": {"rules": [{"exitCodes": [1, 2]}, {"exitCodes": [2]}]}},
            {},
            r"reliability.rules\[1\] can never match",
        ),
    ],
)
def test_what_no_new_job_may_have(spec: dict[str, Any], queue: dict[str, Any], message: str):
    job, its_queue = make_job(**{"numNodes": 1, **spec}), make_queue(**queue)
    with pytest.raises(InvalidSpecError, match=message):
        validate(job, its_queue)
    requests = requests_of(job, its_queue, resolve(job, its_queue).size)
    assert min(requests.nodes, *requests.pod.values()) >= 0, "resolve refuses nothing"


@pytest.mark.parametrize(
    ("spec", "queue"),
    [
        ({"podTemplate": TRAINER}, {"image": None}),
        ({"env": [{"name": "TORCHRUN_SYNC_WAIT_SECONDS", "value": "60"}]}, {}),
        ({}, {"image": None, "podTemplate": TRAINER}),
        ({"numNodes": None, "numGPUs": 80_000}, GPU_NODE),
        ({"volumes": {"workspace": {"source": "none"}}}, {"storage": {"workspace": {}}}),
        (
            {"reliability": {"terminationGracePeriodSeconds": 7200}},
            {"limits": {"maxTerminationGracePeriodSeconds": 7200}},
        ),
        (
            {"volumes": {"workspace": {"source": "existing", "claimName": "code"}}},
            {"storage": {"workspace": {"enabled": False}}},
        ),
        (
            {"volumes": {"workspace": {"source": "none"}}},
            {"storage": {"workspace": {"enabled": False}}},
        ),
    ],
)
def test_what_a_new_job_may_have(spec: dict[str, Any], queue: dict[str, Any]):
    validate(make_job(**{"numNodes": 1, **spec}), make_queue(**queue))


def lose_a_node(world: World) -> None:
    disrupt(world)
    world.settle()
    world.containers_stop()


def fail_a_rank(world: World) -> None:
    fail(world)
    world.settle()
    world.containers_stop()


def reload(world: World) -> None:
    annotate(world, workspace_sha256="b" * 64)
    world.settle()
    revision_complete(world, 2, "b" * 64)


def edit(world: World) -> None:
    world.spec(env=())
    fail_a_rank(world)


def resume(world: World) -> None:
    world.suspend()
    world.resume()


# What a new version refuses: here a limit that the job exceeds, since the running job has none.
NEW_RULE = {"limits": {"maxPriority": 1}}


@pytest.mark.parametrize(
    ("happens", "attempt", "reason"),
    [
        (lambda world: None, 0, "WorkersRunning"),
        (lose_a_node, 1, "Restarting"),
        (fail_a_rank, 1, "Restarting"),
        (reload, 0, "WorkersRunning"),
        (edit, 0, "InvalidSpec"),
        (resume, 0, "InvalidSpec"),
    ],
)
def test_a_rule_that_comes_later_applies_to_edits_only(
    happens: Callable[[World], None], attempt: int, reason: str
):
    world = running(priority=5, reliability={"restartScope": "Gang"})
    world.queue = make_queue(**NEW_RULE)
    happens(world)
    world.settle()
    world.pass_time(minutes=10)
    world.settle()
    assert (world.job.status.attempt, world.job.status.reason) == (attempt, reason)
    if happens is reload:
        assert world.job.status.workspace_revision == 2
    later = World(make_job(numNodes=1, priority=5), world.queue)
    later.settle()
    assert later.job.status.reason == "InvalidSpec"


def test_a_gang_that_waits_for_more_nodes_is_not_checked_again():
    elastic = {"minNodes": 1, "maxNodes": 3}
    world = World(make_job(numNodes=3, elastic=elastic, priority=5), make_queue(quota={"nodes": 9}))
    world.settle()
    world.admit(2)
    world.settle()
    world.all_workers("Running")
    world.queue = make_queue(quota={"nodes": 9}, **NEW_RULE)
    world.settle()
    assert world.condition("FullSize").reason == "WaitingForAdmission"


def test_the_rules_for_jobs_do_not_apply_to_a_queue():
    world = QueueWorld(make_queue(image=None, nodeResources={"gpus": 0}))
    world.settle()
    assert world.condition("TemplateValid").status == "True"


def test_a_lost_status_does_not_make_a_running_spec_new():
    world = running(priority=5, reliability={"restartScope": "Gang"})
    world.job = replace(world.job, status=replace(world.job.status, accepted_generation=0))
    world.queue = make_queue(**NEW_RULE)
    fail_a_rank(world)
    assert world.job.status.reason != "InvalidSpec"
    assert world.job.status.accepted_generation == world.job.metadata.generation
