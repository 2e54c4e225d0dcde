"""One control plane, simulated nodes with GPUs, one Prometheus, and controllers for tests."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.controller_process import Api, ControllerProcess, eventually, install_crds
from integration.kwok import playing
from monitoring.server import Prometheus
from monitoring.shortened import shortened
from torchrun_cluster import LocalCluster, Size, binaries

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SYSTEM = "torchrun-system"
NODES = 4  # with 8 GPUs each
LIFECYCLE = ["--node-monitor-period=1s", "--node-monitor-grace-period=6s"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A control plane with the service account and the roles of the controller."""
    with LocalCluster(
        name=f"test-monitoring-{os.getpid()}",
        size=Size.CONTROL_PLANE,
        scheduler=True,
        extra_args={"kube-controller-manager": LIFECYCLE},
    ) as running:
        install_crds(running)
        documents = yaml.safe_load_all((ROOT / "manifests/controller/deployment.yaml").read_text())
        wanted = [d for d in documents if d["kind"] in ("Namespace", "ServiceAccount")]
        running.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(wanted))
        running.kubectl("apply", "-f", str(ROOT / "manifests/rbac"))
        yield running


@pytest.fixture(scope="session")
def api(cluster: LocalCluster) -> Iterator[Api]:
    client = Api(cluster)
    yield client
    client.close()


@pytest.fixture(scope="session", autouse=True)
def _kwok(cluster: LocalCluster, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Nodes without the label `heart` send no more heartbeats."""
    for number in range(NODES):
        labels = {"heart": "beats", "kubernetes.io/hostname": f"host-{number}"}
        api.create("/api/v1/nodes", {"metadata": {"name": f"node-{number}", "labels": labels}})
    with playing(
        cluster,
        tmp_path_factory.mktemp("kwok"),
        *("--manage-nodes-with-label-selector", "heart=beats"),
        stages=(HERE / "stages.yaml",),
        lease_seconds=4,
    ):
        yield


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus(folder, shortened()).running() as server:
        yield server


class Controllers:
    """Starts controllers with the roles of the manifests, scraped by Prometheus."""

    def __init__(self, cluster: LocalCluster, prometheus: Prometheus, folder: Path) -> None:
        self._cluster = cluster
        self._prometheus = prometheus
        self._folder = folder

    @contextmanager
    def running(
        self, name: str, *flags: str, server: str = "", program: Path | None = None
    ) -> Iterator[ControllerProcess]:
        """Run a controller until the end of the block, optionally another program or API server URL."""
        folder = self._folder / name
        folder.mkdir()
        kubeconfig = self._kubeconfig(folder, server or self._cluster.server)
        process = ControllerProcess(
            self._cluster,
            folder,
            *("--kubeconfig", str(kubeconfig), "--lease-namespace", SYSTEM),
            *flags,
        )
        if program is not None:
            process._command[1:3] = [str(program)]
        with process.running():
            self._scrape(name, process)
            yield process
        self._prometheus.forget(name)

    def _scrape(self, name: str, process: ControllerProcess) -> None:
        """Scrape it, and wait for the first sample, so that counters start at a known value."""
        self._prometheus.scrape(name, process.wait_for_line("serving")["port"])
        query = f'count_over_time(torchrun_build_info{{instance="{name}"}}[1m])'
        eventually(f"{name} is scraped", lambda: self._prometheus.value(query) >= 2)

    def _kubeconfig(self, folder: Path, server: str) -> Path:
        token = self._cluster.kubectl(
            *("create", "token", "-n", SYSTEM, "torchrun-controller", "--duration=2h")
        ).stdout.strip()
        ca = {"server": server, "certificate-authority": str(self._cluster.ca_file)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": ca}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path


@pytest.fixture(scope="session")
def controllers(
    cluster: LocalCluster, prometheus: Prometheus, tmp_path_factory: pytest.TempPathFactory
) -> Controllers:
    return Controllers(cluster, prometheus, tmp_path_factory.mktemp("controllers"))


class Promtool:
    """The program and its output."""

    def __call__(self, *arguments: str, stdin: str = "", folder: Path | None = None) -> str:
        """Run promtool. Returns its output, and raises AssertionError with it on failure."""
        program = str(binaries.ensure(["promtool"])["promtool"])
        result = subprocess.run(
            [program, *arguments],
            input=stdin,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    return Promtool()
