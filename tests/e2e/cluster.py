"""The cluster of the suite, with both images available, before the installation."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchrun_cluster import ClusterError, LocalCluster, binaries, images, state, tools
from torchrun_cluster.engine import Engine, choose, look_at_machine
from torchrun_cluster.kind import KindCluster

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / ".venv" / "plugin" / "bin"
CONTROLLER_IMAGE = "torchrun-controller:0.1.0"
"""As it stands in the manifests."""
ORPHAN = re.compile(r"e2e-(\d+)")
"""The cluster of a test run, by its process: one that was killed could not end it."""
IMAGE_INPUTS = (
    *("pyproject.toml", "README.md", "LICENSE", "requirements"),
    *("api", "controller", "runtime"),
)


@dataclass(frozen=True)
class Cluster:
    """controller, trainer: image names for pods. local: set if components can be restarted."""

    kubeconfig: Path
    programs: Path | None
    controller: str
    trainer: str
    local: LocalCluster | None = None

    @property
    def nodes(self) -> int:
        """How many nodes the local cluster has; 1 where that is not known."""
        return len(self.local.nodes) if self.local else 1

    @property
    def environment(self) -> dict[str, str]:
        """The environment of programs for this cluster: KUBECONFIG, and the plugin on PATH."""
        folders = [
            str(PLUGIN),
            *([str(self.programs)] if self.programs else []),
            os.environ["PATH"],
        ]
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": os.pathsep.join(folders)}

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, seconds: float = 200
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator. With `check`, fails the test with its output."""
        ended = subprocess.run(
            ["kubectl", *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert not check or ended.returncode == 0, f"kubectl {' '.join(arguments)}: {ended.stderr}"
        return ended


def manifests(cluster: Cluster, image: str) -> str:
    """The objects of `kubectl apply -k manifests`, with this image and one replica."""
    text = cluster.kubectl("kustomize", str(ROOT / "manifests")).stdout
    # One replica, which tests inspect and kill. Tests of high availability use two.
    assert text.count("replicas: 2") == 1
    return text.replace("replicas: 2", "replicas: 1").replace(CONTROLLER_IMAGE, image)


@contextmanager
def start(existing: str, nodes: int) -> Iterator[Cluster]:
    """A cluster as selected by CLUSTER. Skips with a reason if this machine cannot have one.

    `existing` names a cluster of `torchrun_cluster up`, which is used unchanged and stays up.
    A new local cluster has this many `nodes`.
    """
    if not (PLUGIN / "kubectl-torchrun").exists():
        raise pytest.UsageError("the plugin is not built; run: make .venv/bin/.plugin")
    name = existing or f"e2e-{os.getpid()}"
    try:
        engine = choose(look_at_machine())
    except ClusterError as error:
        pytest.skip(str(error))
    if engine is Engine.CURRENT:
        yield _current()
        return
    controller = images.build(
        ROOT / "Dockerfile", ROOT, f"docker.io/library/{CONTROLLER_IMAGE}", inputs=IMAGE_INPUTS
    )
    trainer = images.torch()
    local = engine is Engine.LOCAL
    kubectl = binaries.ensure(["kubectl"])["kubectl"] if local else tools.ensure("kubectl")
    new = _local(name, nodes) if local else KindCluster(name)
    try:
        new.up()
        new.load_image(controller)
        new.load_image(trainer)
        restartable = new if isinstance(new, LocalCluster) else None
        yield Cluster(new.kubeconfig, kubectl.parent, CONTROLLER_IMAGE, images.TORCH, restartable)
    finally:
        if not existing:
            new.down()


def _local(name: str, nodes: int) -> LocalCluster:
    for left in state.names():
        process = ORPHAN.fullmatch(left)
        if process and state.read(left) and not Path("/proc", process[1]).exists():
            LocalCluster(name=left).down()
    return LocalCluster.existing(name) if state.read(name) else LocalCluster(name=name, nodes=nodes)


def _current() -> Cluster:
    try:
        images_ = os.environ["CONTROLLER_IMAGE"], os.environ["TRAINER_IMAGE"]
    except KeyError as error:
        raise pytest.UsageError(
            f"CLUSTER=current needs {error}: an image that the nodes of your cluster can pull"
        ) from None
    kubeconfig = Path(os.environ.get("KUBECONFIG", "~/.kube/config")).expanduser()
    return Cluster(kubeconfig, None, *images_)
