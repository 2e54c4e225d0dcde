"""Quota and preemption by the real Kueue, on GPU nodes of kwok and on one real node."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import gpus, rivals
from e2e.cluster import Cluster
from e2e.history import History
from e2e.manifests import job, priority_class, queue
from e2e.space import Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900, func_only=True)]
NODES = 4
GROUP = "kueue.x-k8s.io/v1beta2"
FLAVOR, CLUSTER_QUEUE, LOCAL_QUEUE = "fake-gpus", "torchrun-e2e", "team"
KUEUE = {"gang": "kueue", "queueName": LOCAL_QUEUE, "nodeSelector": {}, "tolerations": []}
"""Where the pods may go stands in Kueue's flavour alone."""
TOLERATION = {**gpus.TAINT, "operator": "Equal"}
LOW, HIGH = "torchrun-e2e-low", "torchrun-e2e-high"
PRIORITIES = {LOW: 1, HIGH: 1000}
OURS = "torchrun-controller"
"""Field manager of what the controller applies."""


def kueue(kind: str, name: str, spec: JsonObject) -> JsonObject:
    return {"apiVersion": GROUP, "kind": kind, "metadata": {"name": name}, "spec": spec}


def cluster_queue(name: str, flavor: str, quota: dict[str, object]) -> JsonObject:
    """A ClusterQueue with this quota, in which higher priorities preempt lower ones."""
    nominal = [{"name": key, "nominalQuota": value} for key, value in quota.items()]
    group = {
        "coveredResources": list(quota),
        "flavors": [{"name": flavor, "resources": nominal}],
    }
    spec: JsonObject = {
        "namespaceSelector": {},
        "resourceGroups": [group],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    return kueue("ClusterQueue", name, spec)


@pytest.fixture(scope="module", autouse=True)
def _kueue(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    whole = {"cpu": NODES * 8, "memory": f"{NODES * 64}Gi", "nvidia.com/gpu": NODES * 8}
    objects = [
        kueue("ResourceFlavor", FLAVOR, {"nodeLabels": gpus.FAKE, "tolerations": [TOLERATION]}),
        kueue("ResourceFlavor", "real", {}),
        cluster_queue(CLUSTER_QUEUE, FLAVOR, whole),
        cluster_queue(f"{CLUSTER_QUEUE}-real", "real", {"cpu": 1, "memory": "4Gi"}),
        *(priority_class(*each) for each in PRIORITIES.items()),
    ]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    log = tmp_path_factory.mktemp("kwok") / "log"
    with gpus.installed(cluster, "kueue"), gpus.nodes(cluster, NODES, log):
        cluster.kubectl("apply", "-f", "-", stdin=listed)
        yield
        cluster.kubectl("delete", "priorityclass", *PRIORITIES)


def team(space: Space) -> None:
    """A LocalQueue, and a TorchrunQueue that uses it."""
    local = kueue("LocalQueue", LOCAL_QUEUE, {"clusterQueue": CLUSTER_QUEUE})
    space.apply(local, gpus.gpu_queue("gpus", KUEUE))


def gang(name: str, nodes: int, **spec: object) -> JsonObject:
    return job(name, "gpus", "train", nodes, **spec)


def assert_written_once(jobs: History) -> None:
    """Check that the fields of the child Job that the controller owns never change."""
    first: dict[str, list[JsonObject]] = {}
    for state in jobs.states():
        meta = state["metadata"]
        ours = [entry for entry in meta["managedFields"] if entry["manager"] == OURS]
        assert ours
        if "deletionTimestamp" in meta:
            continue
        # A field that another manager changes leaves the list; no field is ever added.
        seen = first.setdefault(meta["uid"], ours)
        assert [entry["time"] for entry in ours] == [entry["time"] for entry in seen], meta["name"]


def test_quota_delays_a_gang_before_any_pod_is_created(space: Space):
    with space.histories(PODS, JOBS) as (pods, jobs):
        team(space)
        space.apply(gang("first", NODES))
        space.wait_phase("first", "Running")
        space.apply(gang("large", NODES + 1), gang("second", NODES))
        for name in ("large", "second"):
            assert space.wait_reason(name, "WaitingForKueue")["phase"] == "Queued"
        gpus.end(space, "first", "Succeeded")
        space.wait_phase("first", "Succeeded")
        space.wait_phase("second", "Running")
        gpus.end(space, "second", "Succeeded")
        space.wait_phase("second", "Succeeded")
        status = space.get(TORCHRUN_JOBS, "large")["status"]
        assert status["phase"] == "Queued"
        assert "insufficient quota for" in status["message"]
        assert not [s for s in pods.states() if s["metadata"]["name"].startswith("large-")]
        gpus.assert_never_together(pods, "first", "second")
        assert_written_once(jobs)


def test_a_gang_preempted_by_kueue_runs_again(space: Space):
    team(space)
    with space.histories(TORCHRUN_JOBS, PODS, JOBS) as (torchrun_jobs, pods, jobs):
        space.apply(gang("modest", NODES, scheduling={"priorityClassName": LOW}))
        space.wait_phase("modest", "Running")
        space.apply(gang("urgent", NODES, scheduling={"priorityClassName": HIGH}))
        space.wait_phase("modest", "Preempted")
        space.wait_phase("urgent", "Running")
        status = space.get(TORCHRUN_JOBS, "modest")["status"]
        assert status["phase"] == "Preempted"
        assert "suspended by Kueue" in status["message"]
        assert not status.get("restarts")
        gpus.end(space, "urgent", "Succeeded")
        space.wait_phase("urgent", "Succeeded")
        space.wait_phase("modest", "Running")
        gpus.end(space, "modest", "Succeeded")
        status = space.wait_phase("modest", "Succeeded")
        assert not status.get("restarts")
        phases = torchrun_jobs.phases("modest", "Succeeded")
        assert phases[-4:] == ["Preempted", "Queued", "Running", "Succeeded"] or phases[-3:] == [
            *("Preempted", "Running", "Succeeded")
        ]
        gpus.assert_never_together(pods, "modest", "urgent")
        assert_written_once(jobs)


def test_a_failed_gang_is_admitted_again_after_waiting_ones(space: Space):
    team(space)
    with space.histories(PODS, JOBS) as (pods, jobs):
        space.apply(gang("again", NODES))
        space.wait_phase("again", "Running")
        space.apply(gang("waits", NODES))
        space.wait_reason("waits", "WaitingForKueue")
        gpus.end(space, "again", "Failed", index=1)
        space.wait("torchrunjob/again", "jsonpath={.status.attempt}=1")
        space.wait_phase("waits", "Running")
        status = space.get(TORCHRUN_JOBS, "again")["status"]
        assert (status["phase"], status["restarts"]) == ("Queued", 1)
        gpus.end(space, "waits", "Succeeded")
        space.wait_phase("again", "Running")
        gpus.end(space, "again", "Succeeded")
        assert space.wait_phase("again", "Succeeded")["restarts"] == 1
        assert len({name for name in gpus.bound(pods, "again") if "-r1-" in name}) == NODES
        gpus.assert_never_together(pods, "again", "waits")
        assert_written_once(jobs)


def apply_real_queue(space: Space) -> None:
    """A queue on the real nodes, whose quota a gang of two nodes uses up."""
    local = kueue("LocalQueue", LOCAL_QUEUE, {"clusterQueue": f"{CLUSTER_QUEUE}-real"})
    half = {"cpus": "500m", "memory": "128Mi"}
    image = space.cluster.controller
    space.apply(local, queue("real", image, nodeResources=half, scheduling=KUEUE))


def test_a_restart_in_place_keeps_the_quota_from_a_gang_that_waits(space: Space):
    apply_real_queue(space)
    with space.history(JOBS) as jobs:
        rivals.assert_a_restart_in_place_keeps_the_nodes(space, "real", "WaitingForKueue")
        assert_written_once(jobs)


def test_real_pods_train_under_kueue(space: Space, tmp_path: Path):
    (tmp_path / "train.py").write_text(gpus.DDP)
    local = kueue("LocalQueue", LOCAL_QUEUE, {"clusterQueue": f"{CLUSTER_QUEUE}-real"})
    resources = {"cpus": "250m", "memory": "1Gi"}
    image = space.cluster.trainer
    space.apply(local, queue("torch", image, nodeResources=resources, scheduling=KUEUE))
    options = ("--queue", "torch", "--nodes", "2", "--name", "real")
    with space.history(JOBS) as jobs:
        run = space.submit(tmp_path, "python train.py", *options, seconds=240)
        assert run.returncode == 0, run.stderr
        assert_written_once(jobs)
    assert "sum 2" in run.stdout
    workloads = json.loads(space.kubectl("get", "workloads", "-o", "json"))["items"]
    assert [item["metadata"]["ownerReferences"][0]["name"] for item in workloads] == ["real"]
