"""Writes on a real API server: objects of others stay, and a second apply changes nothing."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from integration.controller_process import install_crds
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import JOBS, PODS, SERVICES, TORCHRUN_JOBS, Kind
from torchrun_api.kinds.status import TorchrunJobStatus, WorkersStatus
from torchrun_cluster import LocalCluster, Size
from torchrun_controller.client import Connection, Transport
from torchrun_controller.client.apply import Applier, WriteResult
from torchrun_controller.client.write_errors import (
    NameConflictError,
    RejectedError,
    SupersededError,
)
from torchrun_controller.reconcile.model.plan import Apply, Delete

OWNER = {
    "apiVersion": "torchrun.ai/v1alpha1",
    "kind": "TorchrunJob",
    "name": "run",
    "uid": "11111111-1111-1111-1111-111111111111",
    "controller": True,
}
NAMESPACE = "default"


class Leading:
    def check(self) -> None:
        pass


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # No garbage collector, because the owners in these tests do not exist.
    with LocalCluster(
        name=f"test-apply-{os.getpid()}",
        size=Size.CONTROL_PLANE,
        extra_args={"kube-controller-manager": ["--controllers=*,-garbage-collector-controller"]},
    ) as running:
        yield running


@pytest.fixture
async def transport(cluster: LocalCluster) -> AsyncIterator[Transport]:
    connection = await Connection.load(str(cluster.kubeconfig), None)
    async with connection.session("write") as session:
        yield session


@pytest.fixture
def applier(transport: Transport) -> Applier:
    return Applier(transport, Leading())


def service(name: str, uid: str = "", **metadata: object) -> Apply:
    return _intent(SERVICES, name, {"clusterIP": "None", "selector": {"a": "b"}}, uid, **metadata)


def job(name: str, uid: str = "", image: str = "trainer:1", **pod: Any) -> Apply:
    spec = {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {"name": "trainer", "image": image, "env": [{"name": "A", "value": "1"}]}
                ],
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                **pod,
            }
        },
    }
    return _intent(JOBS, name, spec, uid)


def pod(name: str, uid: str = "") -> Apply:
    spec = {"restartPolicy": "Never", "containers": [{"name": "c", "image": "sync:1"}]}
    return _intent(PODS, name, spec, uid)


def _intent(kind: Kind[Any], name: str, spec: object, uid: str, **metadata: object) -> Apply:
    body = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {"torchrun-job-name": "run"},
            "ownerReferences": [OWNER],
            **metadata,
        },
        "spec": spec,
    }
    return Apply(kind, msgspec.convert(body, JsonObject), uid)


INTENTS: dict[str, Callable[..., Apply]] = {"service": service, "job": job, "pod": pod}


def raw(cluster: LocalCluster, written: WriteResult | Apply, name: str = "") -> str:
    path = written.kind.path(NAMESPACE, name or getattr(written, "name", ""))
    return cluster.kubectl("get", "--raw", path).stdout


def wait_until_active(cluster: LocalCluster, name: str) -> None:
    """Wait until the Job controller has updated the status of a new Job."""
    active = "--for=jsonpath={.status.active}=2"
    cluster.kubectl("wait", active, f"job/{name}", "--timeout=160s", timeout=180)


def version(cluster: LocalCluster, written: WriteResult) -> str:
    return str(json.loads(raw(cluster, written))["metadata"]["resourceVersion"])


@pytest.mark.parametrize("kind", INTENTS)
async def test_a_second_apply_leaves_the_resource_version_alone(
    cluster: LocalCluster, applier: Applier, kind: str
) -> None:
    name, intent = f"twice-{kind}", INTENTS[kind]
    first = await applier.apply(intent(name))
    again = await applier.apply(intent(name))
    assert again.uid == first.uid, "an own object that the cache missed counts as created"
    if kind == "job":
        wait_until_active(cluster, name)
    before = version(cluster, first)
    forced = await applier.apply(intent(name, first.uid))
    assert forced.resource_version == before == version(cluster, first)


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("kind", INTENTS)
async def test_an_object_of_another_owner_is_not_changed(
    cluster: LocalCluster, applier: Applier, kind: str, owned: bool
) -> None:
    name, intent = f"foreign-{kind}-{owned}".lower(), INTENTS[kind]
    body = json.loads(json.dumps(intent(name).body))
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "x"}
    body["metadata"]["ownerReferences"] = [{**owner, "controller": True}] if owned else []
    cluster.kubectl("create", "--field-manager=somebody", "-f", "-", stdin=json.dumps(body))
    if kind == "job":
        wait_until_active(cluster, name)
    before = raw(cluster, intent(name), name)
    for _ in range(2):
        with pytest.raises(NameConflictError) as caught:
            await applier.apply(intent(name))
    assert raw(cluster, intent(name), name) == before, "byte for byte"
    whose = "belongs to Deployment 'web'" if owned else "was created by "
    assert whose in caught.value.conflict.message
    assert ("somebody" in caught.value.conflict.message) is not owned


@pytest.fixture(scope="module")
def served(cluster: LocalCluster) -> LocalCluster:
    install_crds(cluster)
    return cluster


def create_torchrun_job(cluster: LocalCluster, name: str) -> TorchrunJob:
    body = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {"name": name},
        "spec": {"jobQueue": "research", "numNodes": 1, "command": "python train.py"},
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
    return torchrun_job(cluster, name)


def torchrun_job(cluster: LocalCluster, name: str) -> TorchrunJob:
    path = TORCHRUN_JOBS.path(NAMESPACE, name)
    return msgspec.json.decode(cluster.kubectl("get", "--raw", path).stdout, type=TorchrunJob)


async def test_a_second_apply_of_a_status_leaves_the_resource_version_alone(
    served: LocalCluster, applier: Applier
) -> None:
    job = create_torchrun_job(served, "reported-twice")
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    why = {"reason": "WorkersRunning", "message": "1 of 1 pod is running."}
    condition = Condition(type="Running", status="True", last_transition_time=moment, **why)
    status = TorchrunJobStatus(
        phase="Running",
        observed_generation=1,
        conditions=(condition,),
        workers=WorkersStatus(running=1),
        start_time=moment,
    )
    first = await applier.apply_status(job, status)
    assert first is not None
    job = torchrun_job(served, "reported-twice")
    again = await applier.apply_status(job, status)
    assert again is not None
    assert again.resource_version == first.resource_version
    job = torchrun_job(served, "reported-twice")
    less = await applier.apply_status(job, TorchrunJobStatus(phase="Running"))
    assert less is not None
    kept = json.loads(raw(served, less))["status"]
    assert kept == {"phase": "Running"}, "omitted fields are removed"


async def test_a_status_applies_only_to_the_observed_object_on_a_server(
    served: LocalCluster, applier: Applier
) -> None:
    status = TorchrunJobStatus(phase="Running")
    job = create_torchrun_job(served, "short-lived")
    served.kubectl("label", "torchrunjob", "short-lived", "edited=true")
    with pytest.raises(SupersededError):
        await applier.apply_status(job, status)
    served.kubectl("delete", "torchrunjob", "short-lived")
    assert await applier.apply_status(job, status) is None
    again = create_torchrun_job(served, "short-lived")
    with pytest.raises(SupersededError):
        await applier.apply_status(job, status)
    assert torchrun_job(served, "short-lived") == again


async def test_a_job_with_another_template_is_a_conflict(
    cluster: LocalCluster, applier: Applier
) -> None:
    cluster.kubectl("create", "job", "busy", "--image=other")
    with pytest.raises(NameConflictError, match="kubectl-create"):
        await applier.apply(job("busy"))


async def test_a_replaced_object_is_not_merged(cluster: LocalCluster, applier: Applier) -> None:
    first = await applier.apply(service("replaced"))
    cluster.kubectl("delete", "service", "replaced")
    with pytest.raises(SupersededError):
        await applier.apply(service("replaced", first.uid))
    cluster.kubectl("create", "service", "clusterip", "replaced", "--clusterip=None")
    before = raw(cluster, first)
    with pytest.raises(SupersededError):
        await applier.apply(service("replaced", first.uid))
    assert raw(cluster, first) == before


async def test_an_object_that_is_being_deleted_is_waited_for(
    cluster: LocalCluster, applier: Applier
) -> None:
    await applier.apply(service("leaving", finalizers=["torchrun.ai/test"]))
    cluster.kubectl("delete", "service", "leaving", "--wait=false")
    try:
        with pytest.raises(SupersededError):
            await applier.apply(service("leaving"))
    finally:
        patch = '{"metadata": {"finalizers": null}}'
        cluster.kubectl("patch", "service", "leaving", "--type=merge", "-p", patch)
    await applier.apply(service("leaving"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"restartPolicy": "Always"}, "restartPolicy"),
        ({"terminationGracePeriodSecond": 5}, "terminationGracePeriodSecond: field not declared"),
        ({"containers": "none"}, "expected list"),
        (
            {
                "containers": [
                    {"name": "c", "image": "i", "resources": {"limits": {"cpu": "two"}}},
                ]
            },
            "quantities must match",
        ),
    ],
)
async def test_a_refused_template_has_the_server_message(
    applier: Applier, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(RejectedError, match=message) as caught:
        await applier.apply(job("refused", **wrong))
    assert caught.value.permanent
    assert caught.value.rejection.name == "refused"


async def apply_many(applier: Applier) -> None:
    for number in range(2000):
        await applier.apply(service(f"too-many-{number}"))
        await asyncio.sleep(0.05)


async def test_a_quota_is_a_temporary_rejection(cluster: LocalCluster, applier: Applier) -> None:
    cluster.kubectl("create", "quota", "none", "--hard=count/services=0")
    try:
        cluster.kubectl(
            *("wait", "quota/none", "--for=jsonpath={.status.hard.count/services}=0"),
            "--timeout=160s",
            timeout=180,
        )
        # The status can be visible before the quota is enforced.
        with pytest.raises(RejectedError, match="exceeded quota") as caught:
            await apply_many(applier)
        assert not caught.value.permanent
    finally:
        cluster.kubectl("delete", "quota", "none")


async def test_a_collection_is_the_running_pods_of_one_job(
    cluster: LocalCluster, applier: Applier
) -> None:
    for name, uid in (("one", "uid-1"), ("two", "uid-1"), ("other", "uid-2")):
        await applier.apply(Apply(PODS, worker(name, uid)))
    failed = json.dumps({"status": {"phase": "Failed"}})
    cluster.kubectl("patch", "pod", "two", "--subresource=status", "--type=merge", "-p", failed)
    pods_of_job = Delete(
        kind=PODS, namespace=NAMESPACE, name="gang", uid="uid-1", grace_seconds=5, collection=True
    )
    assert await applier.delete(pods_of_job) is None
    pods = ("pods", "one", "two", "other")
    listed = json.loads(cluster.kubectl("get", *pods, "-o", "json").stdout)
    terminating = {
        pod["metadata"]["name"]: "deletionTimestamp" in pod["metadata"] for pod in listed["items"]
    }
    assert terminating == {"one": True, "two": False, "other": False}
    assert await applier.delete(pods_of_job) is None, "a pod that is terminating stays as it is"
    cluster.kubectl("delete", *pods, "--force", "--grace-period=0")


async def test_the_workers_of_a_job_are_read(cluster: LocalCluster, applier: Applier) -> None:
    assert await applier.find_workers(NAMESPACE, "seen") == frozenset(), "null in the response"
    body = worker("seen-0-bcdfg", "uid-3")
    labels = {names.JOB_LABEL: "seen", names.COMPONENT_LABEL: names.WORKER}
    body["metadata"] = {"name": "seen-0-bcdfg", "namespace": NAMESPACE, "labels": labels}
    created = await applier.apply(Apply(PODS, body))
    assert await applier.find_workers(NAMESPACE, "seen") == {created.uid}
    assert await applier.find_workers(NAMESPACE, "other") == frozenset()
    cluster.kubectl("delete", "pod", "seen-0-bcdfg", "--force", "--grace-period=0")


def worker(name: str, uid: str) -> JsonObject:
    """A pod on a node without a kubelet, with the label of the Job controller."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {names.CONTROLLER_UID_LABEL: uid},
        },
        "spec": {"nodeName": "nowhere", "containers": [{"name": "trainer", "image": "none"}]},
    }


async def test_a_delete_affects_exactly_the_named_object(
    cluster: LocalCluster, applier: Applier
) -> None:
    first = await applier.apply(service("exact"))

    def delete(uid: str, resource_version: str = "") -> Delete:
        return Delete(
            kind=SERVICES,
            namespace=NAMESPACE,
            name="exact",
            uid=uid,
            resource_version=resource_version,
        )

    assert await applier.delete(delete("22222222-2222-2222-2222-222222222222")) is None
    with pytest.raises(SupersededError):
        await applier.delete(delete(first.uid, "1"))
    assert version(cluster, first) == first.resource_version
    await applier.delete(delete(first.uid, first.resource_version))
    assert cluster.kubectl("get", "service", "exact", check=False).returncode != 0
    assert await applier.delete(delete(first.uid)) is None
