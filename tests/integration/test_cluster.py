"""The local control plane: up, restart, compaction, crash and down."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_cluster import ClusterError, LocalCluster, Size, packages, places, processes
from torchrun_cluster.api import wait_until
from torchrun_cluster.node import anchor_pid

NAME = f"test-cluster-{os.getpid()}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(name=NAME, size=Size.CONTROL_PLANE) as running:
        yield running


def config_map_names(cluster: LocalCluster) -> set[str]:
    listing = json.loads(cluster.kubectl("get", "configmaps", "-o", "json").stdout)
    return {item["metadata"]["name"] for item in listing["items"]}


def started_at(cluster: LocalCluster) -> str:
    """The start time of the API server process."""
    lines = cluster.kubectl("get", "--raw", "/metrics").stdout.splitlines()
    return next(line for line in lines if line.startswith("process_start_time_seconds "))


def test_a_second_up_finds_the_cluster_running(cluster: LocalCluster) -> None:
    cluster.kubectl("create", "configmap", "kept")
    before = started_at(cluster)
    LocalCluster(name=NAME, size=Size.CONTROL_PLANE).up()
    assert started_at(cluster) == before
    assert "kept" in config_map_names(cluster)


def test_up_restarts_ended_components_and_keeps_the_objects(cluster: LocalCluster) -> None:
    cluster.kubectl("create", "configmap", "kept-too")
    cluster.kill("kube-controller-manager")
    LocalCluster(name=NAME, size=Size.CONTROL_PLANE).up()
    assert cluster.is_running("kube-controller-manager")
    assert "kept-too" in config_map_names(cluster)


def test_other_settings_are_refused_for_a_running_cluster(cluster: LocalCluster) -> None:
    other = LocalCluster(name=NAME, size=Size.CONTROL_PLANE, scheduler=True)
    with pytest.raises(ClusterError, match="down --name"):
        other.up()


@pytest.mark.parametrize("component", ["kube-apiserver", "etcd"])
def test_objects_survive_a_restart(cluster: LocalCluster, component: str) -> None:
    name = f"before-{component}"
    cluster.kubectl("create", "configmap", name)
    cluster.restart(component)
    assert name in config_map_names(cluster)


def test_a_killed_api_server_stays_down_until_started(cluster: LocalCluster) -> None:
    cluster.kill("kube-apiserver")
    assert not cluster.is_running("kube-apiserver")
    with pytest.raises(ClusterError, match="refused"):
        cluster.kubectl("get", "namespaces")
    cluster.start("kube-apiserver")
    assert cluster.kubectl("get", "namespaces").stdout


def test_a_started_api_server_serves_although_its_process_does_not_show_yet(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.kill("kube-apiserver")
    # As during the exec of the process.
    monkeypatch.setattr(LocalCluster, "is_running", lambda _self, _component: False)
    cluster.start("kube-apiserver")
    assert cluster.kubectl("get", "namespaces").stdout


def test_an_old_revision_is_gone_after_compaction(cluster: LocalCluster) -> None:
    cluster.kubectl("create", "configmap", "compacted")
    cluster.kubectl("delete", "configmap", "compacted")
    revision = cluster.compact_etcd()
    # A running API server serves old revisions from its watch cache; a new one has an empty cache.
    cluster.restart("kube-apiserver")
    path = f"/api/v1/configmaps?resourceVersion={revision - 1}&resourceVersionMatch=Exact"
    answer = cluster.kubectl("get", "--raw", path, check=False)
    assert answer.returncode != 0
    assert "too old" in answer.stderr


def test_extra_arguments_reach_their_component_and_two_clusters_can_run(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    audit = tmp_path / "audit.log"
    policy = tmp_path / "policy.json"
    policy.write_text(
        json.dumps(
            {
                "apiVersion": "audit.k8s.io/v1",
                "kind": "Policy",
                "rules": [{"level": "Metadata"}],
            }
        )
    )
    flags = [f"--audit-log-path={audit}", f"--audit-policy-file={policy}"]
    with LocalCluster(
        name=f"{NAME}-2",
        size=Size.CONTROL_PLANE,
        scheduler=True,
        extra_args={"kube-apiserver": flags},
    ) as second:
        assert second.server != cluster.server
        assert second.is_running("kube-scheduler")
        second.kubectl("create", "configmap", "only-here")
        assert "only-here" not in config_map_names(cluster)
        assert "only-here" in audit.read_text()


def test_an_interrupted_up_is_repaired_and_down_leaves_nothing() -> None:
    name = f"{NAME}-3"
    cut_off = LocalCluster(name=name, size=Size.CONTROL_PLANE)
    cut_off.up()
    folder = cut_off.kubeconfig.parent
    # The state after a SIGKILL of `up`: some processes run, and the record is incomplete.
    record = json.loads((folder / "cluster.json").read_text())
    (folder / "cluster.json").write_text(json.dumps({**record, "complete": False}))
    cut_off.kill("kube-controller-manager")
    old = {process.pid for process in processes.of_cluster(folder)}
    assert old

    recovered = LocalCluster(name=name, size=Size.CONTROL_PLANE)
    recovered.up()
    assert recovered.kubectl("get", "serviceaccount", "default").stdout
    assert not old & {process.pid for process in processes.of_cluster(folder)}

    recovered.down()
    assert not processes.of_cluster(folder)
    assert not folder.exists()
    recovered.down()


CLAIM_AND_PODS = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shared}
spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Mi}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: probe}
spec:
  selector: &labels {matchLabels: {app: probe}}
  template:
    metadata: {labels: {app: probe}}
    spec:
      containers:
        - name: pause
          image: localhost/torchrun-pause:latest
          imagePullPolicy: Never
          volumeMounts: [{name: shared, mountPath: /shared}]
      volumes: [{name: shared, persistentVolumeClaim: {claimName: shared}}]
"""
NETWORK = (("ip", "-o", "address"), ("ip", "route"), ("iptables-save",))
"""Commands that show addresses, routes and rules of a node where it has them."""


def traces_on_the_host(name: str) -> list[str]:
    """Mounts, cgroups and network namespaces that name the cluster."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found = [line for line in mounts if f"/{name}/" in line]
    found += map(str, Path("/sys/fs/cgroup").glob(f"**/torchrun-{name}-*"))
    return found + [path for path in os.listdir("/run") if name in path]


def network(*inside: str) -> list[bool]:
    """For each command of NETWORK: whether it shows something of a node."""
    environment = {**os.environ, "PATH": packages.SEARCH_PATH}
    return [
        "10.244." in subprocess.check_output([*inside, *command], env=environment, text=True)
        for command in NETWORK
    ]


def namespaces() -> set[str]:
    """The namespaces of all processes and of mounts on the host."""
    found = set(re.findall(r"\w+:\[\d+\]", Path("/proc/self/mountinfo").read_text()))
    for link in Path("/proc").glob("[0-9]*/ns/*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))
    return found


@pytest.fixture
def keep() -> Iterator[contextlib.ExitStack]:
    """What is open until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.long  # every run of tests/e2e starts and stops such a cluster
@pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root")
@pytest.mark.parametrize("count", [1, 3])
def test_nodes_with_an_interrupted_up_run_pods_and_leave_nothing(
    count: int, keep: contextlib.ExitStack
) -> None:
    name = f"{NAME}-nodes"
    folder = places.state_home() / name
    node = LocalCluster(name=name, nodes=count)
    up_command = ("up", "--name", name, "--nodes", str(count))
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "torchrun_cluster", *up_command],
            env={**os.environ, "CLUSTER": "local", "PYTHONPATH": str(places.SOURCE)},
            stderr=subprocess.DEVNULL,
        ) as up:
            try:
                while not processes.of_cluster(folder, "kube-apiserver"):
                    assert up.poll() is None
                    os.sched_yield()
            finally:
                up.kill()
        node.up()
        node.kubectl("apply", "-f", "-", stdin=CLAIM_AND_PODS)
        node.kubectl("rollout", "status", "daemonset/probe", "--timeout=50s")
        assert traces_on_the_host(name)
        assert network() == [False] * len(NETWORK)
        inside = [node.inside(one.name) for one in node.nodes]
        assert [network(*command) for command in inside] == [[True] * len(NETWORK)] * count
        files = [
            Path(f"/proc/{anchor_pid(one)}/ns/{kind}")
            for one in node.nodes
            for kind in ("net", "mnt", "pid")
        ]
        own = {os.readlink(file) for file in files}
        assert len(own) == 3 * count
        assert own <= namespaces()
        # The kernel gives the number of a removed namespace to the next one, unless it is open.
        for file in files:
            keep.enter_context(file.open("rb"))
    finally:
        node.down()
    assert not processes.of_cluster(folder)
    assert not folder.exists()
    assert traces_on_the_host(name) == []
    # Init reaps the last process of each node a moment later.
    wait_until(lambda: not own & namespaces(), "the end of the namespaces")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root")
def test_a_node_without_power_comes_back_with_its_pods() -> None:
    with LocalCluster(name=f"{NAME}-power", nodes=2) as cluster:
        cluster.kubectl("apply", "-f", "-", stdin=CLAIM_AND_PODS)
        cluster.kubectl("rollout", "status", "daemonset/probe", "--timeout=50s")
        cluster.power_off("node-2")
        assert not cluster.is_running("kubelet@node-2")
        assert cluster.is_running("kubelet")
        LocalCluster(name=f"{NAME}-power", nodes=2).up()
        pod = ("pod", "-l", "app=probe", "--field-selector=spec.nodeName=node-2")
        restarted = "--for=jsonpath={.status.containerStatuses[0].restartCount}=1"
        cluster.kubectl("wait", *pod, restarted, "--timeout=100s", timeout=120)
        cluster.kubectl("wait", *pod, "--for=condition=Ready", "--timeout=50s")
        with pytest.raises(ClusterError, match="control plane"):
            cluster.power_off("node")
