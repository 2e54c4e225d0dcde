"""The groups and child Jobs for each gang scheduler, compared with golden files."""

from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from shell_world import GOLDEN, ShellWorld, compare
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, TORCHRUN_JOBS, Kind
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.coscheduling import COSCHEDULING_POD_GROUPS
from torchrun_controller.reconcile.schedulers.kai import KAI_POD_GROUPS
from torchrun_controller.reconcile.schedulers.kueue import KUEUE_WORKLOADS
from torchrun_controller.reconcile.schedulers.native import NATIVE_GROUPS
from torchrun_controller.reconcile.schedulers.table import choose
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO_POD_GROUPS
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.requests import total_requests
from world import DEFAULTS, World, make_job, make_queue

ZONE, RACK = "topology.kubernetes.io/zone", "example.com/rack"
NEAR = {"required": ZONE, "preferred": RACK}
NODE = {"nodeResources": {"gpus": 8, "cpus": 96, "memory": "512Gi"}}
AFFINITY: Any = {
    "podAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "mine"}],
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "podAffinityTerm": {"topologyKey": "mine"}}
        ],
    }
}


def installed(*served: Kind[Any], topologies: tuple[str, ...] = ()) -> Installed:
    resources = frozenset((kind.api_version, kind.plural) for kind in served)
    return Installed(resources=resources, topologies=topologies)


EVERYTHING = installed(
    KAI_POD_GROUPS,
    VOLCANO_POD_GROUPS,
    COSCHEDULING_POD_GROUPS,
    *KUEUE_WORKLOADS,
    *NATIVE_GROUPS,
    topologies=("cluster", "other"),
)
V1BETA1, V1ALPHA2, V1ALPHA1 = (installed(kind) for kind in NATIVE_GROUPS)
HEAD = {"head": {"nodeResources": {"gpus": 0, "cpus": 2, "memory": "8Gi"}}}
ELASTIC = {"numNodes": 4, "elastic": {"minNodes": 2, "maxNodes": 8}}


def world_of(
    scheduling: dict[str, Any], there: Installed | None = EVERYTHING, **spec: Any
) -> ShellWorld:
    queue = spec.pop("queue_", {})
    job = make_job(**{"numNodes": 4, "scheduling": spec.pop("job_", {}), **spec})
    world = ShellWorld(job, make_queue(**{**NODE, "scheduling": scheduling, **queue}))
    world.installed = there
    return world


CASES = {
    "kai": world_of({"gang": "kai"}),
    "kai-everything": world_of(
        {"scheduler": "kai-scheduler", "priorityClassName": "high", "topology": NEAR},
        queue_={"kaiQueue": "gpu-training"},
        job_={"topology": {"required": RACK, "name": "other"}},
    ),
    "kai-preferred": world_of({"gang": "kai", "topology": {"preferred": RACK}}),
    "volcano": world_of({"gang": "volcano"}),
    "volcano-everything": world_of(
        {
            "scheduler": "volcano",
            "queueName": "research",
            "priorityClassName": "high",
            "topology": {"required": "volcano.sh/tier-2", "preferred": RACK},
        }
    ),
    "volcano-tiers": world_of(
        {
            "gang": "volcano",
            "topology": {"required": "volcano.sh/rack", "preferred": "volcano.sh/tier-1"},
        }
    ),
    "volcano-soft": world_of(
        {"gang": "volcano", "topology": {"required": ZONE, "preferred": "volcano.sh/tier-1"}}
    ),
    "volcano-labels": world_of({"gang": "volcano", "scheduler": "mine", "topology": NEAR}),
    "coscheduling": world_of({"gang": "coscheduling", "topology": NEAR}),
    "native-1.35": world_of({"topology": NEAR, "priorityClassName": "high"}, V1ALPHA1),
    "native-1.36": world_of({"topology": NEAR, "priorityClassName": "high"}, V1ALPHA2),
    "native-1.37": world_of(
        {"gang": "native", "topology": {"preferred": RACK}, "priorityClassName": "high"}, V1BETA1
    ),
    "native-1.37-plain": world_of({"scheduler": "default-scheduler"}, V1BETA1),
    "kueue": world_of({"gang": "kueue"}),
    "kueue-required": world_of({"gang": "kueue", "queueName": "research", "topology": NEAR}),
    "kueue-preferred": world_of({"gang": "kueue", "topology": {"preferred": RACK}}),
    "none": world_of({"gang": "none"}),
    "none-topology": world_of({"gang": "none", "topology": NEAR, "affinity": AFFINITY}),
    "elastic": world_of({"gang": "volcano"}, **ELASTIC),
    "head-volcano": world_of({"gang": "volcano", "priorityClassName": "high"}, **HEAD),
    "head-native": world_of({"gang": "native", "topology": NEAR}, V1BETA1, **HEAD),
    "head-kai": world_of({"gang": "kai"}, **HEAD),
    "head-coscheduling": world_of({"gang": "coscheduling"}, **HEAD),
}


def shown(world: ShellWorld) -> list[Any]:
    """The groups, and the fields of child Jobs that depend on the gang scheduler."""
    made = [entry["body"] for entry in world.step_and_take() if "body" in entry]
    ours = [body for body in made if body["kind"] not in ("Service", TORCHRUN_JOBS.kind)]
    assert ours[-1]["kind"] == "Job"
    return [scheduled(body) if body["kind"] == "Job" else body for body in ours]


def scheduled(job: Any) -> Any:
    template = job["spec"]["template"]
    fields = ("schedulerName", "priorityClassName", "affinity", "workloadRef", "schedulingGroup")
    return {
        "metadata": {
            name: job["metadata"][name]
            for name in ("name", "labels", "annotations")
            if name in job["metadata"]
        },
        "suspend": job["spec"].get("suspend"),
        "template": {
            "metadata": template["metadata"],
            "spec": {name: template["spec"][name] for name in fields if name in template["spec"]},
        },
    }


@pytest.mark.parametrize("name", CASES)
def test_objects_for_each_scheduler(name, pytestconfig):
    text = yaml.safe_dump_all(shown(CASES[name]), sort_keys=False, width=100)
    compare(text, GOLDEN / "gangs" / f"{name}.yaml", pytestconfig)


@pytest.mark.parametrize(
    ("queue", "listed", "reason", "preemptibility"),
    [
        ({"kaiQueue": "training"}, (), "Synced", "preemptible"),
        ({"kaiQueue": "training"}, (), None, "preemptible"),
        ({"kaiQueue": "training"}, ("other",), "NotAllowed", "preemptible"),
        ({"kaiQueue": "training"}, ("ml",), "Synced", None),
        ({"kaiQueue": "theirs"}, (), "NotManaged", None),
        ({}, (), None, None),
    ],
)
def test_kai_may_preempt_the_jobs_of_a_queue_without_quota(
    queue: dict[str, Any], listed: tuple[str, ...], reason: str | None, preemptibility: str | None
):
    """Else it would never run those of a priority of 100 or more."""
    world = world_of({"gang": "kai", "priorityClassName": "high"}, queue_=queue)
    world.defaults = replace(DEFAULTS, kai_quota_namespaces=listed)
    if reason is not None:
        condition = Condition(type="KaiQueueReady", status="True", reason=reason)
        status = replace(world.queue.status, conditions=(condition,))
        world.queue = replace(world.queue, status=status)
    (group,) = (made for made in shown(world) if made.get("kind") == "PodGroup")
    assert group["spec"].get("preemptibility") == preemptibility


# The choice


@pytest.mark.parametrize(
    ("scheduling", "there", "gang"),
    [
        ({}, EVERYTHING, "native"),
        ({}, installed(KAI_POD_GROUPS, VOLCANO_POD_GROUPS), "none"),
        ({}, Installed(), "none"),
        ({}, None, "none"),
        ({"scheduler": "default-scheduler"}, EVERYTHING, "native"),
        ({"scheduler": "mine"}, EVERYTHING, "none"),
        ({"scheduler": "kai-scheduler"}, EVERYTHING, "kai"),
        ({"scheduler": "volcano"}, Installed(), "volcano"),
        ({"scheduler": "scheduler-plugins-scheduler"}, EVERYTHING, "coscheduling"),
        ({"scheduler": "default-scheduler", "gang": "coscheduling"}, EVERYTHING, "coscheduling"),
        ({"scheduler": "volcano", "gang": "none"}, EVERYTHING, "none"),
        ({"scheduler": "volcano", "gang": "kueue"}, EVERYTHING, "kueue"),
        ({"scheduler": "mine", "gang": "native"}, EVERYTHING, "native"),
    ],
)
def test_the_choice_of_a_scheduler(scheduling, there, gang):
    assert choose(make_queue(scheduling=scheduling), there).gang == gang


def test_a_pod_template_can_choose_the_scheduler():
    queue = make_queue(podTemplate={"spec": {"schedulerName": "volcano"}})
    assert choose(queue, EVERYTHING).gang == "volcano"
    job = make_job(podTemplate={"spec": {"schedulerName": "mine"}})
    assert choose(queue, EVERYTHING, job).gang == "none"
    of_no_use = make_job(podTemplate={"spec": {"schedulerName": 1}})
    assert choose(queue, EVERYTHING, of_no_use).gang == "volcano"


@pytest.mark.parametrize(
    ("gang", "scheduler"),
    [("kai", "volcano"), ("native", "kai-scheduler"), ("volcano", "default-scheduler")],
)
def test_a_gang_scheduler_must_match_the_scheduler_name(gang, scheduler):
    queue = make_queue(scheduling={"gang": gang, "scheduler": scheduler})
    with pytest.raises(InvalidSpecError, match=f"sets scheduling.gang to {gang}, but"):
        choose(queue, EVERYTHING)
    world = World(make_job(numNodes=2), queue)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "InvalidSpec")


# Missing kinds


@pytest.mark.parametrize("gang", ["kai", "volcano", "coscheduling", "native", "kueue"])
def test_a_job_waits_for_a_missing_scheduler(gang):
    world = world_of({"gang": gang}, Installed())
    plan = world.settle()
    assert not plan.applies
    assert world.phase == "Pending"
    assert world.job.status.reason == "GangSchedulerMissing"
    assert "or set spec.scheduling.gang of the queue to none" in world.job.status.message
    assert world.condition("QueueReady").status == "True"
    events = [event for plan in world.plans for event in plan.events]
    assert [(e.type, e.reason) for e in events] == [("Warning", "GangSchedulerMissing")]
    world.installed = EVERYTHING
    world.step()
    assert world.phase == "Queued"


def test_nothing_is_created_before_discovery():
    world = world_of({"gang": "volcano"}, None)
    world.settle()
    assert world.job.status.reason == "GangSchedulerUnknown"
    assert not world.created


def test_kai_cannot_keep_workers_together_without_a_topology():
    world = world_of({"gang": "kai", "topology": NEAR}, installed(KAI_POD_GROUPS))
    world.settle()
    assert world.job.status.reason == "InvalidSpec"
    assert "Topology" in world.job.status.message


@pytest.mark.parametrize("length", [63, 64])
def test_a_local_queue_name_must_be_a_valid_label(length):
    long = "team." + "a" * (length - 5)
    named = world_of({"gang": "kueue", "queueName": long})
    called = world_of({"gang": "kueue"}, jobQueue=long)
    called.queue = replace(called.queue, metadata=replace(called.queue.metadata, name=long))
    for world, field in ((named, "queueName"), (called, "name")):
        world.settle()
        assert (world.job.status.reason == "InvalidSpec") is (length > 63)
        assert (f"its {field} has 64 characters" in world.job.status.message) is (length > 63)
        assert bool(world.created) is (length == 63)


def test_only_kueue_puts_the_queue_name_into_a_label():
    long = "team." + "a" * 70
    world = world_of({"gang": "volcano", "queueName": long}, jobQueue=long)
    world.queue = replace(world.queue, metadata=replace(world.queue.metadata, name=long))
    world.settle()
    assert world.created


# What a gang requests


def test_groups_request_the_whole_gang():
    spec: Any = {
        "containers": [
            {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"gpu": 8}}},
            {"resources": {"limits": {"cpu": 1, "memory": "1Gi"}}},
        ],
        "initContainers": [
            {"resources": {"requests": {"cpu": 1}}},
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}},
            {"resources": {"requests": {"cpu": 2, "ephemeral-storage": "1Gi"}}},
        ],
        "overhead": {"cpu": "250m"},
    }
    assert total_requests((({"spec": spec}, 4),)) == {
        "cpu": "9400m",  # 2.1 at the start (1.6 later) and 0.25
        "ephemeral-storage": "4Gi",
        "gpu": "32",
        "memory": "8Gi",
    }


@pytest.mark.parametrize("amount", [[1], "much"])
def test_invalid_resource_requests_are_an_invalid_spec(amount):
    container = {"name": "exporter", "resources": {"requests": {"cpu": amount}}}
    world = world_of(
        {"gang": "volcano"}, queue_={"podTemplate": {"spec": {"containers": [container]}}}
    )
    world.settle()
    assert world.job.status.reason == "InvalidSpec"
    assert "podTemplate: the resources of the pods are invalid" in world.job.status.message


def test_invalid_affinity_is_left_to_the_api_server():
    world = world_of({"gang": "none", "topology": NEAR, "affinity": {"podAffinity": "near"}})
    (job,) = (apply.body for apply in world.plan().applies if apply.kind is JOBS)
    terms = job["spec"]["template"]["spec"]["affinity"]["podAffinity"]
    assert len(terms) == 2
