"""A cluster made by kind (https://kind.sigs.k8s.io), where a Docker engine answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import state, tools
from .artefacts import locked
from .errors import ClusterError
from .progress import step

WAIT = "180s"
IMAGE_SETTING = "KIND_IMAGE"
"""Names the node image where `up --image` does not; the default is that of kind's version."""
SHARED_VOLUMES = "/var/local-path-provisioner"
"""kind's own folder for volumes; naming it as shared lets its provisioner bind ReadWriteMany."""


class KindCluster:
    """A kind cluster by its name; kind itself keeps its state."""

    def __init__(self, name: str, port: int = 0, image: str = "") -> None:
        self.name = name
        self._port = port
        self._image = image or os.environ.get(IMAGE_SETTING, "")
        self._folder = state.folder_of(name)
        self.kubeconfig = self._folder / "kubeconfig"
        self._record = self._folder / "kind.json"

    @property
    def recorded(self) -> bool:
        """Whether `up` has made a kind cluster of this name."""
        return self._record.exists()

    @property
    def _kind_name(self) -> str:
        return f"torchrun-{self.name}"

    def is_running(self) -> bool:
        """Whether kind lists the cluster."""
        return self._kind_name in self._kind("get", "clusters").split()

    def up(self) -> None:
        """Create the cluster, or find it; what a crash left is deleted first."""
        with locked(self._folder):
            if self.recorded and self.is_running():
                return
            with step(f"kind cluster {self._kind_name}"):
                self._kind("delete", "cluster", "--name", self._kind_name)
                self._create()
            with step("shared volumes"):
                self._share_volumes()
            self._record.write_text(json.dumps({"name": self._kind_name}))

    def down(self) -> None:
        """Delete the cluster and its folder."""
        with locked(self._folder):
            self._kind("delete", "cluster", "--name", self._kind_name)
            shutil.rmtree(self._folder)

    def load_image(self, archive: Path) -> None:
        """Import an image archive into the cluster's node."""
        self._kind("load", "image-archive", str(archive), "--name", self._kind_name)

    def _create(self) -> None:
        config = {
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "networking": {"apiServerPort": self._port} if self._port else {},
        }
        arguments = ["--name", self._kind_name, "--wait", WAIT, "--config", "-"]
        if self._image:
            arguments += ["--image", self._image]
        self._kind("create", "cluster", *arguments, stdin=json.dumps(config))

    def _share_volumes(self) -> None:
        patch = {"data": {"config.json": json.dumps({"sharedFileSystemPath": SHARED_VOLUMES})}}
        target = ("configmap", "local-path-config", "--namespace", "local-path-storage")
        self._kubectl("patch", *target, "--type=merge", f"--patch={json.dumps(patch)}")
        deployment = ("deployment", "local-path-provisioner", "--namespace", "local-path-storage")
        self._kubectl("rollout", "restart", *deployment)
        self._kubectl("rollout", "status", *deployment, f"--timeout={WAIT}")

    def _kind(self, *arguments: str, stdin: str | None = None) -> str:
        return self._run([str(tools.ensure("kind")), *arguments], stdin)

    def _kubectl(self, *arguments: str) -> str:
        return self._run([str(tools.ensure("kubectl")), *arguments])

    def _run(self, command: Sequence[str], stdin: str | None = None) -> str:
        result = subprocess.run(
            command,
            input=stdin,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise ClusterError(f"`{' '.join(command)}` failed:\n{result.stderr.strip()}")
        return result.stdout
