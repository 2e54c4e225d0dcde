"""The KAI queue of a TorchrunQueue."""

from typing import Any

import pytest
from msgspec.structs import replace

from queue_world import KAI, NOTHING, QueueWorld, a_job, kai_queue, make_trq
from torchrun_api import names
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_controller.reconcile.queue import QueuePlan
from world import DEFAULTS

QUOTA = {"gpus": 16, "cpu": "1500m", "memory": "1Gi"}
UNLIMITED = {"quota": -1, "limit": -1, "overQuotaWeight": 1}
ALLOWED = replace(DEFAULTS, kai_quota_namespaces=("other", "ml"))


def world_of(*, parents: tuple[str, ...] = ("default-parent-queue",), **spec: Any) -> QueueWorld:
    """A queue of a namespace that may set the quota, weight and parent of its KAI queue."""
    world = QueueWorld(make_trq(**{"kaiQueue": "training", **spec}), KAI)
    world.defaults = ALLOWED
    assert world.kai is not None
    world.kai.update({name: kai_queue(name) for name in parents})
    return world


def kai_of(world: QueueWorld, name: str = "training") -> Any:
    assert world.kai is not None
    return world.kai[name]


def test_the_kai_queue_is_created_and_kept_in_sync():
    world = world_of(quota=QUOTA, weight=3)
    world.settle()
    created = kai_of(world)
    assert created.metadata.annotations == {names.KAI_OWNER: "ml/gpu"}
    assert created.spec == {
        "parentQueue": "default-parent-queue",
        "resources": {
            "gpu": {"quota": 16, "limit": 16, "overQuotaWeight": 3},
            "cpu": {"quota": 1500, "limit": 1500, "overQuotaWeight": 3},
            "memory": {"quota": 1074, "limit": 1074, "overQuotaWeight": 3},
        },
    }
    assert world.condition("KaiQueueReady").reason == "Synced"
    assert world.step() == QueuePlan()
    edited = replace(created, spec={**created.spec, "parentQueue": "other", "priority": 5})
    world.kai["training"] = edited
    world.settle()
    assert kai_of(world).spec["parentQueue"] == "default-parent-queue"


def test_another_scheduler_does_not_use_the_kai_queue():
    world = world_of()
    world.settle()
    assert "Set scheduling.scheduler to kai-scheduler." in world.condition("KaiQueueReady").message
    world.edit(kaiQueue="training", scheduling={"scheduler": "kai-scheduler"})
    world.settle()
    assert "Set scheduling" not in world.condition("KaiQueueReady").message


def test_unset_quotas_are_unlimited():
    world = world_of()
    world.settle()
    assert kai_of(world).spec["resources"] == dict.fromkeys(("gpu", "cpu", "memory"), UNLIMITED)


def test_a_cohort_lends_beyond_the_quota():
    world = world_of(quota={"gpus": 4}, cohort="all")
    world.settle()
    assert kai_of(world).spec["resources"]["gpu"] == {
        "quota": 4,
        "limit": -1,
        "overQuotaWeight": 1,
    }


def test_a_quota_of_zero_is_passed_on_and_reported():
    world = world_of(quota={"gpus": 0, "cpu": "0"}, weight=0)
    world.settle()
    assert kai_of(world).spec["resources"]["gpu"]["limit"] == 0
    assert "Its quota for gpus, cpu is 0" in world.condition("KaiQueueReady").message


def test_a_changed_quota_is_passed_on():
    world = world_of(quota={"gpus": 4})
    world.settle()
    uid = kai_of(world).metadata.uid
    world.edit(kaiQueue="training", quota={"gpus": 8})
    world.settle()
    assert kai_of(world).spec["resources"]["gpu"]["quota"] == 8
    assert kai_of(world).metadata.uid == uid


IDLE_ONLY = {"quota": 0, "limit": -1, "overQuotaWeight": 1}


@pytest.mark.parametrize(
    ("spec", "refused", "parent", "gpu"),
    [
        ({}, "", "default", IDLE_ONLY),
        ({"parentKaiQueue": "default"}, "", "default", IDLE_ONLY),
        (
            {"parentKaiQueue": "default-parent-queue"},
            "",
            "default-parent-queue",
            IDLE_ONLY,
        ),
        ({"parentKaiQueue": "team-b"}, "spec.parentKaiQueue", "default", IDLE_ONLY),
        ({"weight": 0}, "", "default", {**IDLE_ONLY, "overQuotaWeight": 0}),
        ({"weight": 1000}, "spec.weight", "default", IDLE_ONLY),
        ({"quota": {"gpus": 0}}, "", "default", {**IDLE_ONLY, "limit": 0}),
        ({"quota": {"gpus": 64}}, "spec.quota", "default", {**IDLE_ONLY, "limit": 64}),
        ({"quota": {"cpu": "64"}, "cohort": "all"}, "spec.quota", "default", IDLE_ONLY),
        (
            {"quota": {"gpus": 64}, "weight": 2, "parentKaiQueue": "team-b"},
            "spec.parentKaiQueue, spec.quota, spec.weight",
            "default",
            {**IDLE_ONLY, "limit": 64},
        ),
    ],
)
def test_only_allowed_namespaces_take_from_other_kai_queues(
    spec: dict[str, Any], refused: str, parent: str, gpu: dict[str, int]
):
    world = world_of(parents=("default", "default-parent-queue", "team-b"), **spec)
    world.settle()
    assert world.condition("KaiQueueReady").reason == "Synced"
    world.defaults = DEFAULTS
    world.settle()
    created = kai_of(world)
    assert (created.spec["parentQueue"], created.spec["resources"]["gpu"]) == (parent, gpu)
    condition = world.condition("KaiQueueReady")
    if not refused:
        assert condition.reason == "Synced"
        return
    assert (condition.status, condition.reason) == ("False", "NotAllowed")
    assert f"Namespace ml may not set {refused} of KAI queue training." in condition.message
    assert "--kai-quota-namespaces" in condition.message
    assert ("is a limit" in condition.message) is ("quota" in spec)
    assert world.condition("Ready").status == "True", "the queue goes on"
    assert world.reasons() == ["NotAllowed"]


def test_a_queue_does_not_become_the_parent_of_others_unless_it_is_allowed():
    world = world_of(kaiQueue="default")
    world.defaults = DEFAULTS
    world.settle()
    assert "default" not in (world.kai or ())
    assert "may not set spec.kaiQueue" in world.condition("KaiQueueReady").message
    world.defaults = ALLOWED
    world.settle()
    assert kai_of(world, "default").spec["parentQueue"] == "default-parent-queue"


class TestParents:
    """The parent queue: the configured one, or the first existing default."""

    @pytest.mark.parametrize(
        ("parents", "spec", "parent"),
        [
            (("default", "default-parent-queue"), {}, "default"),
            (("default-parent-queue",), {}, "default-parent-queue"),
            (("default", "mine"), {"parentKaiQueue": "mine"}, "mine"),
        ],
    )
    def test_which(self, parents, spec, parent):
        world = world_of(parents=parents, **spec)
        world.settle()
        assert kai_of(world).spec["parentQueue"] == parent

    def test_a_later_parent_changes_nothing(self):
        world = world_of()
        world.settle()
        world.kai["default"] = kai_queue("default")
        assert world.step() == QueuePlan()

    @pytest.mark.parametrize(
        ("spec", "message"),
        [({"parentKaiQueue": "mine"}, "KAI queue mine"), ({}, "default or default-parent-queue")],
    )
    def test_a_missing_parent(self, spec, message):
        world = world_of(parents=(), **spec)
        world.settle()
        assert world.kai == {}
        condition = world.condition("KaiQueueReady")
        assert (condition.status, condition.reason) == ("False", "ParentNotFound")
        assert message in condition.message
        assert world.reasons() == ["ParentNotFound"]
        world.kai.update(mine=kai_queue("mine"), default=kai_queue("default"))
        world.settle()
        assert world.condition("KaiQueueReady").status == "True"

    def test_a_missing_default_for_a_parent_that_is_not_allowed(self):
        world = world_of(parents=("team-b",), parentKaiQueue="team-b")
        world.defaults = DEFAULTS
        world.settle()
        message = world.condition("KaiQueueReady").message
        assert "default or default-parent-queue" in message
        assert "may not set spec.parentKaiQueue" in message


def test_kai_can_be_installed_later():
    world = world_of()
    world.installed = NOTHING
    world.settle()
    assert world.condition("KaiQueueReady").reason == "KaiNotInstalled"
    assert world.queue is not None
    assert world.queue.status.phase == "Active", "jobs can use another scheduler"
    world.installed = KAI
    world.settle()
    assert world.condition("KaiQueueReady").status == "True"


@pytest.mark.parametrize(
    "problem", ["cannot list queues.scheduling.run.ai", "the cache is not synced yet"]
)
def test_unreadable_kai_queues_are_reported(problem):
    world = world_of()
    world.installed, world.kai, world.kai_problem = None, None, problem
    world.settle()
    assert world.condition("KaiQueueReady").status == "Unknown"
    assert problem in world.condition("KaiQueueReady").message


def test_a_refused_write_is_reported():
    world = world_of()
    message = "cannot patch resource queues in API group scheduling.run.ai"
    world.refused = {("queues.scheduling.run.ai", "training"): message}
    world.settle()
    assert world.condition("KaiQueueReady").message == message
    assert world.condition("Ready").reason == "KaiQueueNotReady"
    assert world.kai is not None
    assert "training" not in world.kai


def test_a_kai_queue_of_another_owner_is_used_and_not_written():
    world = world_of()
    world.kai["training"] = kai_queue("training", parentQueue="theirs")
    world.settle()
    assert world.condition("KaiQueueReady").reason == "NotManaged"
    assert kai_of(world).spec == {"parentQueue": "theirs"}
    world.delete()
    world.settle()
    assert world.queue is None
    assert "training" in world.kai


def test_a_parent_queue_cannot_be_used():
    world = world_of()
    world.kai["child"] = kai_queue("child", parentQueue="training")
    world.settle()
    assert world.condition("KaiQueueReady").reason == "NotALeaf"


def test_an_invalid_quota():
    world = world_of(quota={"cpu": "many"})
    world.settle()
    assert world.condition("KaiQueueReady").reason == "InvalidSpec"
    assert "'many'" in world.condition("KaiQueueReady").message


def other(age: int, namespace: str = "other", name: str = "gpu") -> TorchrunQueue:
    return make_trq(name, namespace, age, kaiQueue="training")


class TestConflicts:
    """The oldest of several TorchrunQueues owns a KAI queue."""

    def test_the_younger_queue_has_a_conflict(self):
        world = world_of()
        world.kai_users = (other(age=60),)
        world.settle()
        assert world.condition("KaiQueueReady").reason == "Conflict"
        assert "other/gpu" in world.condition("KaiQueueReady").message
        assert world.condition("Ready").status == "False"
        assert world.kai is not None
        assert "training" not in world.kai
        assert world.reasons() == ["Conflict"]

    def test_the_older_queue_has_no_conflict(self):
        world = world_of()
        world.kai_users = (other(age=-60),)
        world.settle()
        assert world.condition("KaiQueueReady").reason == "Synced"

    def test_queues_of_the_same_age_are_ordered_by_name(self):
        world = world_of()
        world.kai_users = (other(age=0),)
        world.settle()
        assert world.condition("KaiQueueReady").reason == "Synced", (
            "namespace ml comes before other"
        )

    def test_queues_of_one_namespace_share(self):
        world = world_of()
        world.kai_users = (other(age=60, namespace="ml", name="elder"),)
        world.settle()
        assert world.condition("KaiQueueReady").reason == "Shared"
        assert world.condition("Ready").status == "True"

    def test_the_next_takes_over(self):
        world = world_of()
        world.kai["training"] = kai_queue("training", "other/gone")
        world.settle()
        assert kai_of(world).metadata.annotations == {names.KAI_OWNER: "ml/gpu"}

    def test_a_kai_queue_of_an_unwatched_namespace_is_a_conflict(self):
        world = world_of()
        world.namespace = "ml"
        world.kai["training"] = kai_queue("training", "other/unseen")
        world.settle()
        assert world.condition("KaiQueueReady").reason == "Conflict"
        world.namespace = ""
        world.settle()
        assert world.condition("KaiQueueReady").reason == "Synced"


class TestRemoval:
    """The KAI queue is deleted with its queue, or when its name changes."""

    def test_the_kai_queue_is_deleted_with_its_queue(self):
        world = world_of()
        world.settle()
        world.delete()
        world.settle()
        assert world.queue is None
        assert list(world.kai or ()) == ["default-parent-queue"]

    def test_a_kai_queue_of_another_queue_stays(self):
        world = world_of()
        world.settle()
        world.kai_users = (other(age=-60),)
        world.delete()
        world.settle()
        assert world.queue is None
        assert "training" in (world.kai or ())

    def test_child_queues_keep_it_and_are_reported(self):
        world = world_of()
        world.settle()
        world.delete()
        world.refused = {("queues.scheduling.run.ai", "training"): "it has children"}
        world.settle()
        assert world.condition("Ready").message == (
            "The KAI queue cannot be removed: training: it has children."
        )
        world.refused = {}
        world.settle()
        assert world.queue is None

    def test_deletion_waits_until_kai_queues_are_readable(self):
        world = world_of()
        world.settle()
        world.kai, world.kai_problem = None, "cannot list"
        world.delete()
        world.settle()
        assert "cannot list" in world.condition("Ready").message

    @pytest.mark.parametrize("reason", ["Synced", "NotAllowed", "NotALeaf"])
    def test_each_state_with_a_kai_queue_waits(self, reason: str):
        world = world_of(weight=2)
        world.defaults = DEFAULTS if reason == "NotAllowed" else ALLOWED
        if reason == "NotALeaf":
            world.kai["child"] = kai_queue("child", parentQueue="training")
        world.settle()
        assert world.condition("KaiQueueReady").reason == reason
        world.kai = None
        world.delete()
        world.settle()
        assert "cannot be removed" in world.condition("Ready").message

    def test_kai_is_uninstalled(self):
        world = world_of()
        world.settle()
        world.kai, world.installed = None, NOTHING
        world.delete()
        world.settle()
        assert world.queue is None

    def test_a_changed_name_creates_another_kai_queue(self):
        world = world_of()
        world.settle()
        world.jobs = [a_job("run", "Running", gang=True)]
        world.edit(kaiQueue="second")
        world.settle()
        assert {"training", "second"} <= set(world.kai or ()), "a job still uses the former queue"
        world.jobs = []
        world.settle()
        assert "training" not in (world.kai or ())
        world.edit()
        world.settle()
        assert list(world.kai or ()) == ["default-parent-queue"]
        assert "KaiQueueReady" not in world.condition_types()

    @pytest.mark.parametrize("deleted", [False, True])
    @pytest.mark.parametrize("namespace", ["ml", "other"])
    def test_a_former_kai_queue_that_another_queue_names_stays(self, namespace, deleted):
        """Jobs of the other queue may run in it, also while that queue is being deleted."""
        world = world_of()
        world.settle()
        user = other(age=-60, namespace=namespace, name="younger")
        if deleted:
            user = replace(user, metadata=replace(user.metadata, deletion_timestamp=world.now))
        world.kai_users = (user, make_trq("third", kaiQueue="third"))
        world.edit(kaiQueue="second")
        world.settle()
        assert {"training", "second"} <= set(world.kai or ())
        world.kai_users = world.kai_users[1:]
        world.settle()
        assert "training" not in (world.kai or ())

    @pytest.mark.parametrize("deleted", [False, True])
    def test_a_deleted_queue_does_not_wait_for_another_deleted_one(self, deleted):
        world = world_of()
        world.settle()
        world.jobs = [a_job("run", "Running", gang=True)]
        world.edit(kaiQueue="second")
        world.settle()
        user = other(age=-60)
        if deleted:
            user = replace(user, metadata=replace(user.metadata, deletion_timestamp=world.now))
        world.kai_users, world.jobs = (user,), []
        world.delete()
        world.settle()
        assert world.queue is None
        assert ("training" in (world.kai or ())) is not deleted
        assert "second" not in (world.kai or ())

    def test_a_kai_queue_is_deleted_as_it_was_seen(self):
        """Another TorchrunQueue may have taken it over since."""
        world = world_of()
        world.settle()
        mine = kai_of(world)
        world.kai["training"] = replace(mine, metadata=replace(mine.metadata, resource_version="7"))
        world.edit(kaiQueue="second")
        (former,) = world.decide().deletes
        world.delete()
        (own,) = world.decide().deletes
        assert (former.resource_version, own.resource_version) == ("7", "7")

    def test_a_remaining_former_kai_queue_is_reported(self):
        world = world_of()
        world.settle()
        world.edit()
        world.refused = {("queues.scheduling.run.ai", "training"): "it has children"}
        world.settle()
        assert world.condition("KaiQueueReady").reason == "NotRemoved"


def test_ages_without_a_time():
    world = world_of()
    ageless = other(age=0)
    meta = replace(ageless.metadata, creation_timestamp=None)
    world.kai_users = (replace(ageless, metadata=meta),)
    world.settle()
    assert world.condition("KaiQueueReady").reason == "Conflict"
