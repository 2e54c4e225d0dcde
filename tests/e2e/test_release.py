"""`make release`: an empty cluster gets it from its files alone, and a job survives the upgrade to it.

The previous release is the newest tag, or, while there is no tag, the same code with another version.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.manifests import queue, zip_job
from e2e.space import CONTROLLER
from pages import blocks
from release_checkout import ROOT, copy_checkout, git
from torchrun_api.json import JsonObject
from torchrun_api.names import JOB_LABEL, TRAINER_CONTAINER
from torchrun_cluster import ClusterError, LocalCluster, binaries
from torchrun_cluster.artefacts import sha256_of
from torchrun_cluster.engine import Engine, choose, look_at_machine
from torchrun_release import archives, image, kubernetes, source, versions

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

REGISTRY = "registry.example.com/team"
SAME_CODE = "0.0.1"
"""The version of the previous release as long as no tag exists."""
WAIT_FOR_A_FILE = "import os, time\nwhile not os.path.exists('/tmp/end'): time.sleep(0.2)\n"


@dataclass(frozen=True)
class Release:
    """A checkout, and the folder that `make release` has written in it."""

    checkout: Path
    version: str

    @property
    def dist(self) -> Path:
        return self.checkout / "dist"

    @property
    def image(self) -> str:
        return f"{REGISTRY}/torchrun-controller:{self.version}"


def build(checkout: Path) -> Release:
    """Run `make release`. Fails the test with its output."""
    release = Release(checkout, versions.current(checkout))
    ended = subprocess.run(
        ["make", "release", f"VERSION={release.version}", f"REGISTRY={REGISTRY}"],
        cwd=checkout,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stderr)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return release


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Release:
    checkout = tmp_path_factory.mktemp("new") / "checkout"
    copy_checkout(checkout)
    return build(checkout)


@pytest.fixture(scope="module")
def previous(new: Release, tmp_path_factory: pytest.TempPathFactory) -> Release:
    checkout = tmp_path_factory.mktemp("previous") / "checkout"
    listed = git(ROOT, "tag", "--list", "v*", "--sort=-version:refname").split()
    tags = [tag for tag in listed if tag != f"v{new.version}"]
    if tags:
        git(ROOT, "clone", "--quiet", "--branch", tags[0], str(ROOT), str(checkout))
    else:
        copy_checkout(checkout, SAME_CODE)
    return build(checkout)


@dataclass(frozen=True)
class User:
    """Somebody with a kubeconfig, kubectl, helm, and the plugin of one release."""

    cluster: LocalCluster
    plugin: Path

    def run(self, *command: str, folder: Path | None = None, stdin: str = "") -> str:
        """Run a program and return its stdout. Fails the test with its output."""
        programs = binaries.ensure(["kubectl", "helm"])
        folders = [str(self.plugin), *{str(path.parent) for path in programs.values()}]
        path = os.pathsep.join([*folders, os.environ["PATH"]])
        ended = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig), "PATH": path},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def install(self, release: Release) -> None:
        """Apply install.yaml and wait until all replicas have the new image."""
        self.run("kubectl", "apply", "--server-side", "-f", str(release.dist / kubernetes.INSTALL))
        self.run("kubectl", "rollout", "status", *CONTROLLER, "--timeout=300s")
        assert {pod["spec"]["containers"][0]["image"] for pod in self.controllers()} == {
            release.image
        }

    def controllers(self) -> list[dict[str, Any]]:
        """The pods of the controller that are not about to end."""
        label = "app.kubernetes.io/name=torchrun-controller"
        return self.pods("-n", "torchrun-system", "-l", label)

    def pods(self, *options: str) -> list[dict[str, Any]]:
        items = json.loads(self.run("kubectl", "get", "pods", "-o", "json", *options))["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def workers(self, job: str) -> dict[str, str]:
        """UIDs of the job's pods, by name."""
        pods = self.pods("-l", f"{JOB_LABEL}={job},batch.kubernetes.io/job-name")
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def wait(self, job: str, phase: str) -> None:
        condition = f"--for=jsonpath={{.status.phase}}={phase}"
        self.run("kubectl", "wait", f"torchrunjob/{job}", condition, "--timeout=300s")

    def submit(self, folder: Path, made: JsonObject, *options: str) -> None:
        """`kubectl torchrun submit -f` with the files of a folder."""
        manifest = folder.with_name(f"{made['metadata']['name']}.json")
        manifest.write_text(json.dumps(made))
        self.run("kubectl", "torchrun", "submit", "-f", str(manifest), *options, folder=folder)


def user(cluster: LocalCluster, release: Release, folder: Path) -> User:
    """With the plugin from the wheel of a release."""
    venv.create(folder, with_pip=True)
    (wheel,) = release.dist.glob("kubectl_torchrun-*.whl")
    command = [str(folder / "bin" / "pip"), "install", "--quiet", str(wheel)]
    subprocess.run(command, check=True)
    return User(cluster, folder / "bin")


def uninstallation() -> list[str]:
    """The commands of docs/install.md for those who have no checkout."""
    page = ROOT / "docs" / "install.md"
    (script,) = (block.text for block in blocks(page) if "test_release.py uninst" in block.argument)
    return script.splitlines()


@pytest.fixture
def cluster(previous: Release, new: Release) -> Iterator[LocalCluster]:
    """An empty cluster, whose node has the images of both releases, as if pulled."""
    try:
        engine = choose(look_at_machine())
    except ClusterError as error:
        pytest.skip(str(error))
    if engine is not Engine.LOCAL:
        pytest.skip("needs a local cluster: the image is loaded into its node")
    with LocalCluster(name=f"release-{os.getpid()}") as running:
        for release in (previous, new):
            running.load_image(release.dist / f"torchrun-controller-{release.version}.oci.tar")
        yield running


def test_a_release_installs_and_upgrades_while_a_job_runs(
    cluster: LocalCluster, previous: Release, new: Release, tmp_path: Path
) -> None:
    before = user(cluster, previous, tmp_path / "before")
    before.install(previous)
    before.run("kubectl", "apply", "-f", "-", stdin=json.dumps(queue("plain", previous.image)))
    before.run("kubectl", "torchrun", "doctor")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(WAIT_FOR_A_FILE)
    lasting = zip_job("lasting", "plain", "exec python3 train.py", 2)
    before.submit(project, lasting, "--wait=Running")
    pods = before.workers("lasting")
    assert len(pods) == 2

    after = user(cluster, new, tmp_path / "after")
    assert after.run("kubectl", "torchrun", "--version").strip().endswith(new.version)
    after.install(new)
    after.run("kubectl", "torchrun", "doctor")
    assert after.workers("lasting") == pods
    after.wait("lasting", "Running")

    (project / "train.py").write_text("print('done')\n")
    after.submit(project, zip_job("next", "plain", "python3 train.py"), "--wait=Succeeded")
    (pod,) = after.pods("-l", f"{JOB_LABEL}=next,batch.kubernetes.io/job-name")
    assert new.image in {container["image"] for container in pod["spec"]["initContainers"]}
    for name in pods:
        touch = ("touch", "/tmp/end")
        after.run("kubectl", "exec", name, "-c", TRAINER_CONTAINER, "--", *touch)
    after.wait("lasting", "Succeeded")
    assert after.workers("lasting").items() <= pods.items()

    # The chart of the release takes the installation over.
    chart = new.dist / f"torchrun-controller-{new.version}.tgz"
    after.run(
        *("helm", "upgrade", "--install", "--take-ownership", "torchrun-controller", str(chart)),
        *("--namespace", "torchrun-system", "--wait", "--timeout=300s"),
    )
    after.submit(project, zip_job("by-helm", "plain", "python3 train.py"), "--wait=Succeeded")

    for line in uninstallation():
        after.run(*shlex.split(line))
    left = after.run("kubectl", "get", "namespaces,clusterroles,clusterrolebindings", "-o", "name")
    assert [name for name in left.split() if "/torchrun-" in name] == []
    after.wait("by-helm", "Succeeded")  # objects of users stay


def test_the_files_are_complete(new: Release) -> None:
    check = ["sha256sum", "--check", "--strict", "--quiet", archives.SUMS]
    subprocess.run(check, cwd=new.dist, check=True)
    version = new.version
    assert {path.name for path in new.dist.iterdir()} == {
        *("install.yaml", "krew.yaml", "SHA256SUMS", f"torchrun-controller-{version}.tgz"),
        *(f"torchrun-controller-{version}.{kind}" for kind in ("oci.tar", "cdx.json")),
        *(f"{name}-{version}-py3-none-any.whl" for name in ("kubectl_torchrun", "torchrun_sdk")),
        *(
            f"kubectl-torchrun-{version}-{platform}.tar.gz"
            for platform in ("darwin-amd64", "darwin-arm64", "linux-amd64", "linux-arm64")
        ),
    }
    bill = json.loads((new.dist / f"torchrun-controller-{version}.cdx.json").read_text())
    assert bill["metadata"]["component"]["version"] == version
    assert "aiohttp" in {part["name"] for part in bill["components"]}


def test_two_builds_of_the_image_are_the_same(new: Release, tmp_path: Path) -> None:
    commit = source.find_commit(new.checkout, new.version)
    source.export(new.checkout, commit, tmp_path / "source")
    name = kubernetes.name_image(tmp_path / "source", REGISTRY)
    cached = image.build(tmp_path / "source", new.version, name, commit)
    shutil.rmtree(cached.parent)
    again = image.build(tmp_path / "source", new.version, name, commit)
    (tmp_path / "dist").mkdir()
    image.write(again, tmp_path / "dist", new.version, commit)
    for path in (tmp_path / "dist").iterdir():
        assert sha256_of(path) == sha256_of(new.dist / path.name), path.name
