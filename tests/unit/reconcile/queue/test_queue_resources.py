"""The objects of spec.resources."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from queue_world import QueueWorld, make_trq
from torchrun_api import names
from torchrun_api.extras import ConfigMap
from torchrun_controller.reconcile.queue import QueuePlan
from world import START

SETTINGS = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"nccl.conf": "NCCL_DEBUG=INFO"}}


def claim(size: Any = "10Gi", **spec: Any) -> dict[str, Any]:
    resources = {"resources": {"requests": {"storage": size}}} if size is not None else {}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "spec": {"accessModes": ["ReadWriteMany"], **resources, **spec},
    }


def entry(name: str = "settings", template: Any = SETTINGS, **fields: Any) -> dict[str, Any]:
    return {"name": name, "template": template, **fields}


def world_of(*entries: dict[str, Any]) -> QueueWorld:
    world = QueueWorld(make_trq(resources=list(entries)))
    world.settle()
    return world


def resource(world: QueueWorld, name: str = "settings") -> Any:
    assert world.queue is not None
    return next(r for r in world.queue.status.resources if r.name == name)


def test_objects_have_owner_and_label_and_stay():
    world = world_of(entry(), entry("cache", claim(), nameMode="Exact"))
    made = world.get("ConfigMap", "gpu-settings")
    assert made.data == SETTINGS["data"]
    assert made.metadata.labels[names.QUEUE_LABEL] == "gpu"
    (owner,) = made.metadata.owner_references
    assert (owner.kind, owner.name, owner.uid, owner.controller) == (
        *("TorchrunQueue", "gpu", "uid-ml-gpu"),
        True,
    )
    assert world.get("PersistentVolumeClaim", "cache").metadata.namespace == "ml"
    assert resource(world).object == "ConfigMap/gpu-settings"
    assert resource(world).ready
    assert world.condition("ResourcesReady").status == "True"
    assert world.events == []
    assert world.step() == QueuePlan()


def test_a_new_object_is_not_ready_and_causes_no_warning():
    world = QueueWorld(make_trq(resources=[entry()]))
    plan = world.step()
    assert plan.status is not None
    assert plan.status.phase == "Updating"
    assert plan.status.resources[0].message == "Creating the object."
    assert world.condition("ResourcesReady").status == "Unknown"
    assert plan.events == ()


def test_labels_and_annotations_of_a_template_apply():
    metadata = {"labels": {"team": "ml", names.QUEUE_LABEL: "not"}, "annotations": {"a": "b"}}
    made = world_of(entry(template={**SETTINGS, "metadata": metadata})).get(
        "ConfigMap", "gpu-settings"
    )
    assert made.metadata.labels["team"] == "ml"
    assert made.metadata.labels[names.QUEUE_LABEL] == "gpu"
    assert made.metadata.annotations["a"] == "b"


def test_drift_is_corrected_and_fields_of_others_stay():
    world = world_of(entry())
    made = world.get("ConfigMap", "gpu-settings")
    theirs = replace(made, data=made.data | {"theirs": "x"}, binary_data={"b": "eA=="})
    world.extras["ConfigMap", "gpu-settings"] = theirs
    assert world.step() == QueuePlan()
    world.extras["ConfigMap", "gpu-settings"] = replace(made, data={"nccl.conf": "edited"})
    world.settle()
    assert world.get("ConfigMap", "gpu-settings").data == SETTINGS["data"]


def test_a_template_that_changes_is_applied():
    world = world_of(entry())
    uid = world.get("ConfigMap", "gpu-settings").metadata.uid
    world.edit(resources=[entry(template={**SETTINGS, "data": {}})])
    world.settle()
    made = world.get("ConfigMap", "gpu-settings")
    assert (made.data, made.metadata.uid) == ({}, uid)


def test_an_immutable_object_stays():
    world = world_of(entry(immutable=True))
    world.edit(resources=[entry(template={**SETTINGS, "data": {}}, immutable=True)])
    world.settle()
    assert world.get("ConfigMap", "gpu-settings").data == SETTINGS["data"]
    assert resource(world).ready


def test_the_object_of_a_removed_entry_is_deleted():
    world = world_of(entry(), entry("other"))
    world.edit(resources=[entry("other")])
    world.settle()
    assert list(world.extras) == [("ConfigMap", "gpu-other")]
    world.edit()
    world.settle()
    assert world.extras == {}
    assert world.condition_types() == ["Ready", "TemplateValid"]


def test_a_refused_delete_is_not_repeated():
    world = world_of(entry())
    world.edit()
    world.refused = {("configmaps", "gpu-settings"): "may not delete"}
    world.settle()
    assert len(world.extras) == 1


def test_a_terminating_object_is_waited_for():
    world = world_of(entry())
    made = world.get("ConfigMap", "gpu-settings")
    going = replace(made, metadata=replace(made.metadata, deletion_timestamp=START))
    world.extras["ConfigMap", "gpu-settings"] = going
    world.settle()
    assert "is being deleted" in resource(world).message
    world.edit()
    world.settle()
    assert all(plan.deletes == () for plan in world.plans)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"apiVersion": "v1", "kind": "Secret"}, "template is v1 Secret, but only v1 ConfigMap"),
        (
            {"apiVersion": "apps/v1", "kind": "ConfigMap"},
            "template is apps/v1 ConfigMap, but only v1 ConfigMap",
        ),
        ({}, "template is None None, but only v1 ConfigMap"),
        ({**SETTINGS, "metadata": {"namespace": "kube-system"}}, "template.metadata.namespace"),
        ({**SETTINGS, "metadata": {"ownerReferences": []}}, "template.metadata.ownerReferences"),
    ],
)
def test_other_kinds_and_namespaces_are_refused(template, message):
    world = world_of(entry(template=template))
    assert world.extras == {}
    assert message in resource(world).message
    assert world.condition("ResourcesReady").status == "False"
    assert world.condition("Ready").reason == "ResourcesNotReady"
    (event,) = world.events
    assert (event.type, event.reason) == ("Warning", "ResourcesNotReady")
    assert message in event.message


def test_an_invalid_template_keeps_the_existing_object():
    world = world_of(entry())
    world.edit(resources=[entry(template={"apiVersion": "v1", "kind": "Secret"})])
    world.settle()
    assert ("ConfigMap", "gpu-settings") in world.extras


def test_two_entries_for_one_object_are_refused():
    world = world_of(entry("a"), entry("gpu-a", nameMode="Exact"))
    assert resource(world, "a").ready
    assert "another entry of spec.resources" in resource(world, "gpu-a").message


def test_two_entries_of_one_name_have_one_status():
    world = world_of(entry("a"), entry("a"))
    assert world.queue is not None
    (status,) = world.queue.status.resources
    assert not status.ready
    assert "another entry of spec.resources" in status.message


def test_a_refusal_is_reported_and_not_repeated_at_once():
    world = QueueWorld(make_trq(resources=[entry()]))
    world.refused = {("configmaps", "gpu-settings"): "ConfigMap exists already"}
    world.settle()
    assert all(apply.kind.kind != "ConfigMap" for plan in world.plans for apply in plan.applies)
    assert resource(world).message == "ConfigMap exists already"
    assert world.reasons() == ["ResourcesNotReady"]


@pytest.mark.parametrize(
    ("unseen", "message"),
    [
        ({"configmaps": "cannot list configmaps"}, "cannot list"),
        ({}, "the cache is not synced yet"),
    ],
)
def test_nothing_is_created_without_a_view_of_the_kind(unseen, message):
    world = QueueWorld(make_trq(resources=[entry()]))
    world.extras, world.unseen = None, unseen
    world.settle()
    assert message in resource(world).message


class TestClaims:
    """Only the size of a PVC can change, and it can only grow."""

    def test_growth(self):
        world = world_of(entry("c", claim("10Gi")))
        world.edit(resources=[entry("c", claim("20Gi"))])
        world.settle()
        made = world.get("PersistentVolumeClaim", "gpu-c")
        assert made.spec["resources"]["requests"]["storage"] == "20Gi"
        assert resource(world, "c").ready

    def test_a_claim_that_was_grown_by_others_keeps_its_size(self):
        world = world_of(entry("c", claim("10Gi")))
        self.becomes(world, claim("30Gi", storageClassName="fast", volumeName="pv-1"))
        world.settle()
        assert resource(world, "c").ready
        world.edit(resources=[entry("c", claim("20Gi"))])
        world.settle()
        made = world.get("PersistentVolumeClaim", "gpu-c")
        assert made.spec["resources"]["requests"]["storage"] == "30Gi"
        assert "has 30Gi; a PVC cannot shrink to 20Gi." in resource(world, "c").message
        assert resource(world, "c").ready

    def test_immutable_fields_of_a_claim_are_reported_and_kept(self):
        world = world_of(entry("c", claim()))
        template = claim(accessModes=["ReadWriteOnce"], storageClassName="fast")
        world.edit(resources=[entry("c", template)])
        world.settle()
        made = world.get("PersistentVolumeClaim", "gpu-c")
        assert made.spec["accessModes"] == ["ReadWriteMany"]
        assert resource(world, "c").message == (
            "spec.accessModes of a PVC is immutable. spec.storageClassName of a PVC is immutable."
            " Delete the PVC and its data, or choose another name."
        )

    def test_a_claim_without_a_size(self):
        world = world_of(entry("c", claim(None)))
        world.edit(resources=[entry("c", claim(None, volumeMode="Filesystem"))])
        world.settle()
        assert "volumeMode" in resource(world, "c").message

    @pytest.mark.parametrize("size", ["much", -1, True, ["1Gi"]])
    def test_an_invalid_size(self, size):
        world = world_of(entry("c", claim()))
        world.edit(resources=[entry("c", claim(size))])
        world.settle()
        assert "template.spec.resources" in resource(world, "c").message

    def test_sizes_are_compared_as_quantities(self):
        world = world_of(entry("c", claim("1024Mi")))
        self.becomes(world, claim("1Gi"))
        world.settle()
        assert resource(world, "c").ready
        assert all(plan.applies == () for plan in world.plans[3:])

    @staticmethod
    def becomes(world: QueueWorld, body: dict[str, Any]) -> None:
        made = world.get("PersistentVolumeClaim", "gpu-c")
        world.extras["PersistentVolumeClaim", "gpu-c"] = replace(made, spec=body["spec"])


def test_a_template_without_data_creates_an_empty_object():
    template = {"apiVersion": "v1", "kind": "ConfigMap"}
    world = world_of(entry(template=template))
    assert world.get("ConfigMap", "gpu-settings") == msgspec.convert(
        {"metadata": msgspec.to_builtins(world.get("ConfigMap", "gpu-settings").metadata)},
        ConfigMap,
    )
