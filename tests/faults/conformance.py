"""Checks of the simulated API server and its controllers, which the real ones must pass, too.

`tests/faults/test_conformance.py` runs them on the simulation, and
`tests/integration/test_simulation.py` on a kube-apiserver with its controller-manager. Each check
has its own namespace.
"""

from collections.abc import Awaitable, Callable

from bodies import Body
from faults.conformance_api import (
    CONFIG_MAPS,
    CONTAINER,
    NODE,
    Api,
    eventually,
    next_change,
    refused,
    version,
)
from faults.conformance_jobs import CHECKS_OF_JOBS
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS
from torchrun_controller.client.apply import ABSENT, APPLY_PATCH
from torchrun_controller.leader import LEASES


async def an_apply_that_requires_absence_creates_or_is_refused(api: Api) -> None:
    created = await api.apply(
        CONFIG_MAPS, "a", metadata={"resourceVersion": ABSENT}, data={"k": "1"}
    )
    assert created["metadata"]["uid"]
    error = await refused(
        api.apply(CONFIG_MAPS, "a", metadata={"resourceVersion": ABSENT}, data={"k": "2"})
    )
    assert error.status == 409
    assert (await api.send("GET", CONFIG_MAPS, "a"))["data"] == {"k": "1"}


async def an_apply_with_a_uid_applies_to_that_object_only(api: Api) -> None:
    other = {"uid": "11111111-1111-1111-1111-111111111111"}
    assert (await refused(api.apply(CONFIG_MAPS, "a", metadata=other))).status == 409
    created = await api.create(CONFIG_MAPS, "a", data={"k": "1"})
    error = await refused(api.apply(CONFIG_MAPS, "a", metadata=other, data={"k": "2"}))
    assert (error.status, {cause.field for cause in error.causes}) == (422, {"metadata.uid"})
    own = {"uid": created["metadata"]["uid"]}
    assert (await api.apply(CONFIG_MAPS, "a", metadata=own, data={"k": "2"}))["data"] == {"k": "2"}


async def an_apply_of_the_same_changes_nothing(api: Api) -> None:
    first = await api.apply(CONFIG_MAPS, "a", data={"k": "1"})
    assert version(await api.apply(CONFIG_MAPS, "a", data={"k": "1"})) == version(first)


async def a_manager_removes_only_its_own_fields(api: Api) -> None:
    await api.apply(CONFIG_MAPS, "a", "one", metadata={"annotations": {"x": "1", "y": "1"}})
    await api.apply(CONFIG_MAPS, "a", "two", metadata={"annotations": {"z": "2", "y": "1"}})
    left = await api.apply(CONFIG_MAPS, "a", "one", metadata={"annotations": {"w": "3"}})
    assert left["metadata"]["annotations"] == {"w": "3", "z": "2", "y": "1"}
    managers = {entry["manager"] for entry in left["metadata"]["managedFields"]}
    assert managers == {"one", "two"}


async def a_conflict_is_refused_without_force(api: Api) -> None:
    await api.apply(CONFIG_MAPS, "a", "one", data={"k": "1"})
    error = await refused(api.apply(CONFIG_MAPS, "a", "two", force=False, data={"k": "2"}))
    assert (error.status, error.reason) == (409, "Conflict")
    await api.apply(CONFIG_MAPS, "a", "two", force=False, data={"k": "1"})
    await api.apply(CONFIG_MAPS, "a", "two", data={"k": "2"})
    left = await api.apply(CONFIG_MAPS, "a", "one", data={"other": "1"})
    assert left["data"] == {"k": "2", "other": "1"}


async def a_plain_write_takes_over_a_field(api: Api) -> None:
    await api.apply(CONFIG_MAPS, "a", "one", data={"k": "1", "l": "1"})
    await api.send("PATCH", CONFIG_MAPS, "a", {"data": {"k": "2"}})
    left = await api.apply(CONFIG_MAPS, "a", "one", data={"l": "1"})
    assert left["data"] == {"k": "2", "l": "1"}


async def a_dry_run_stores_nothing(api: Api) -> None:
    body = api.body(CONFIG_MAPS, "a", metadata={"resourceVersion": ABSENT})
    await api.send(
        "PATCH", CONFIG_MAPS, "a", body, "", APPLY_PATCH, fieldManager="one", dryRun="All"
    )
    assert (await refused(api.send("GET", CONFIG_MAPS, "a"))).status == 404


SPEC = {"jobQueue": "q", "numNodes": 1, "command": "true"}


def condition(kind: str) -> Body:
    return {
        "type": kind,
        "status": "True",
        "reason": "R",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


async def a_status_write_checks_the_version_and_changes_the_status_only(api: Api) -> None:
    created = await api.create(TORCHRUN_JOBS, "a", spec=SPEC)
    now = {"uid": created["metadata"]["uid"], "resourceVersion": version(created)}
    status = {"phase": "Running", "conditions": [condition("Running")]}
    applied = await api.apply(TORCHRUN_JOBS, "a", "one", sub="status", metadata=now, status=status)
    assert (applied["metadata"]["generation"], applied["status"]["phase"]) == (1, "Running")
    late = api.apply(TORCHRUN_JOBS, "a", "one", sub="status", metadata=now, status={})
    assert (await refused(late)).status == 409
    gone = api.apply(TORCHRUN_JOBS, "b", "one", sub="status", metadata=now, status={})
    assert (await refused(gone)).status == 404


async def each_field_manager_owns_its_conditions(api: Api) -> None:
    await api.create(TORCHRUN_JOBS, "a", spec=SPEC)
    status = {"phase": "Running", "conditions": [condition("Running")]}
    await api.apply(TORCHRUN_JOBS, "a", "one", sub="status", status=status)
    status = {"conditions": [condition("Admitted")]}
    both = await api.apply(TORCHRUN_JOBS, "a", "two", sub="status", status=status)
    assert {c["type"] for c in both["status"]["conditions"]} == {"Running", "Admitted"}
    left = await api.apply(TORCHRUN_JOBS, "a", "two", sub="status", status={})
    assert [c["type"] for c in left["status"]["conditions"]] == ["Running"]
    assert left["status"]["phase"] == "Running"


async def the_generation_counts_specs(api: Api) -> None:
    await api.create(TORCHRUN_JOBS, "a", spec=SPEC)
    noted = await api.send("PATCH", TORCHRUN_JOBS, "a", {"metadata": {"annotations": {"a": "b"}}})
    assert noted["metadata"]["generation"] == 1
    edited = await api.send("PATCH", TORCHRUN_JOBS, "a", {"spec": {"suspend": True}})
    assert edited["metadata"]["generation"] == 2


async def a_delete_applies_to_the_named_object_only(api: Api) -> None:
    created = await api.create(CONFIG_MAPS, "a")
    for precondition in ({"uid": "another"}, {"resourceVersion": "1"}):
        request = api.send("DELETE", CONFIG_MAPS, "a", {"preconditions": precondition})
        assert (await refused(request)).status == 409
    exact = {"uid": created["metadata"]["uid"], "resourceVersion": version(created)}
    await api.send("DELETE", CONFIG_MAPS, "a", {"preconditions": exact})
    gone = api.send("DELETE", CONFIG_MAPS, "a", {"preconditions": exact})
    assert (await refused(gone)).status == 404


async def a_finalizer_delays_a_deletion(api: Api) -> None:
    await api.apply(CONFIG_MAPS, "a", metadata={"finalizers": ["torchrun.ai/queue"]})
    await api.send("DELETE", CONFIG_MAPS, "a", {})
    terminating = await api.send("GET", CONFIG_MAPS, "a")
    assert terminating["metadata"]["deletionTimestamp"]
    await api.apply(CONFIG_MAPS, "a", metadata={"finalizers": []})
    assert (await refused(api.send("GET", CONFIG_MAPS, "a"))).status == 404


async def a_lease_is_created_once_and_patched_by_version(api: Api) -> None:
    created = await api.create(LEASES, "a", spec={"holderIdentity": "one"})
    error = await refused(api.create(LEASES, "a", spec={"holderIdentity": "two"}))
    assert (error.status, error.reason) == (409, "AlreadyExists")
    patch = {"metadata": {"resourceVersion": version(created)}, "spec": {"holderIdentity": "two"}}
    await api.send("PATCH", LEASES, "a", patch)
    assert (await refused(api.send("PATCH", LEASES, "a", patch))).status == 409


STREAMED = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}


async def a_streamed_list_ends_with_a_bookmark_and_continues(api: Api) -> None:
    for name in ("a", "b"):
        await api.create(CONFIG_MAPS, name, metadata={"labels": {"l": "1"}})

    async with api.watch(CONFIG_MAPS, labelSelector="l=1", **STREAMED) as frames:
        listed = [await anext(frames) for _ in range(3)]
        await api.send("PATCH", CONFIG_MAPS, "a", {"data": {"k": "1"}})
        await api.send("PATCH", CONFIG_MAPS, "b", {"metadata": {"labels": {"l": None}}})
        await api.send("DELETE", CONFIG_MAPS, "a", {})
        changes = [await next_change(frames) for _ in range(3)]
    events = [(f["type"], f["object"]["metadata"].get("name")) for f in listed]
    assert sorted(events[:2]) == [("ADDED", "a"), ("ADDED", "b")]
    assert events[2][0] == "BOOKMARK"
    assert "k8s.io/initial-events-end" in listed[2]["object"]["metadata"]["annotations"]
    events = [(f["type"], f["object"]["metadata"]["name"]) for f in changes]
    assert events == [("MODIFIED", "a"), ("DELETED", "b"), ("DELETED", "a")]
    versions = [int(version(frame["object"])) for frame in (listed[2], *changes)]
    assert versions == sorted(set(versions))


async def a_watch_resumes_from_a_version(api: Api) -> None:
    created = await api.create(CONFIG_MAPS, "a", metadata={"labels": {"l": "1"}})
    await api.send("PATCH", CONFIG_MAPS, "a", {"data": {"k": "1"}})
    since = {"labelSelector": "l", "resourceVersion": version(created)}
    async with api.watch(CONFIG_MAPS, **since) as frames:
        frame = await anext(frames)
    assert frame["type"] == "MODIFIED"


async def a_watch_without_a_version_starts_with_existing_objects(api: Api) -> None:
    await api.create(LEASES, "a")
    await api.create(LEASES, "b")
    async with api.watch(LEASES, fieldSelector="metadata.name=b") as frames:
        frame = await anext(frames)
    assert (frame["type"], frame["object"]["metadata"]["name"]) == ("ADDED", "b")


async def a_list_has_a_version_and_the_selected_objects(api: Api) -> None:
    await api.create(CONFIG_MAPS, "a", metadata={"labels": {"l": "1"}})
    await api.create(CONFIG_MAPS, "b")
    listed = await api.send("GET", CONFIG_MAPS, labelSelector="l=1")
    assert [item["metadata"]["name"] for item in listed["items"]] == ["a"]
    assert int(version(listed)) > 0


async def a_pod_without_a_node_is_deleted_at_once_and_others_terminate(api: Api) -> None:
    spec = {"containers": [CONTAINER], "restartPolicy": "Never"}
    await api.create(PODS, "a", spec=spec)
    await api.send("DELETE", PODS, "a", {})
    assert (await refused(api.send("GET", PODS, "a"))).status == 404
    await api.create(PODS, "b", spec={**spec, "nodeName": NODE})
    await api.send("DELETE", PODS, "b", {"gracePeriodSeconds": 20})
    meta = (await api.send("GET", PODS, "b"))["metadata"]
    assert (bool(meta["deletionTimestamp"]), meta["deletionGracePeriodSeconds"]) == (True, 20)
    await api.send("DELETE", PODS, "b", {"gracePeriodSeconds": 0})
    assert (await refused(api.send("GET", PODS, "b"))).status == 404


async def a_collection_of_selected_pods_is_deleted(api: Api) -> None:
    spec = {"containers": [CONTAINER], "restartPolicy": "Never", "nodeName": NODE}
    for name, label in (("a", "1"), ("b", "1"), ("c", "2"), ("ended", "1")):
        await api.create(PODS, name, metadata={"labels": {"g": label}}, spec=spec)
    await api.send("PATCH", PODS, "ended", {"status": {"phase": "Failed"}}, "status")
    options = {"gracePeriodSeconds": 20, "propagationPolicy": "Background"}
    select = {"labelSelector": "g=1", "fieldSelector": "status.phase!=Failed"}
    await api.send("DELETE", PODS, "", options, **select)
    left = (await api.send("GET", PODS))["items"]
    grace = {
        pod["metadata"]["name"]: pod["metadata"].get("deletionGracePeriodSeconds") for pod in left
    }
    assert grace == {"a": 20, "b": 20, "c": None, "ended": None}


async def objects_of_a_deleted_owner_are_collected(api: Api) -> None:
    owner = await api.create(CONFIG_MAPS, "owner")
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner"}
    reference["uid"] = owner["metadata"]["uid"]
    await api.create(CONFIG_MAPS, "owned", metadata={"ownerReferences": [reference]})
    await api.send("DELETE", CONFIG_MAPS, "owner", {"propagationPolicy": "Background"})

    async def is_collected() -> bool:
        listed = await api.send("GET", CONFIG_MAPS)
        return all(item["metadata"]["name"] != "owned" for item in listed["items"])

    await eventually(is_collected)


CHECKS: dict[str, Callable[[Api], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        an_apply_that_requires_absence_creates_or_is_refused,
        an_apply_with_a_uid_applies_to_that_object_only,
        an_apply_of_the_same_changes_nothing,
        a_manager_removes_only_its_own_fields,
        a_conflict_is_refused_without_force,
        a_plain_write_takes_over_a_field,
        a_dry_run_stores_nothing,
        a_status_write_checks_the_version_and_changes_the_status_only,
        each_field_manager_owns_its_conditions,
        the_generation_counts_specs,
        a_delete_applies_to_the_named_object_only,
        a_finalizer_delays_a_deletion,
        a_lease_is_created_once_and_patched_by_version,
        a_streamed_list_ends_with_a_bookmark_and_continues,
        a_watch_resumes_from_a_version,
        a_watch_without_a_version_starts_with_existing_objects,
        a_list_has_a_version_and_the_selected_objects,
        a_pod_without_a_node_is_deleted_at_once_and_others_terminate,
        a_collection_of_selected_pods_is_deleted,
        objects_of_a_deleted_owner_are_collected,
        *CHECKS_OF_JOBS,
    )
}
