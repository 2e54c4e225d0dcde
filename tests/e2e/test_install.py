"""Installation by kustomize and by Helm, under the restricted Pod Security profile."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from e2e import controller
from e2e.cluster import CONTROLLER_IMAGE, IMAGE_INPUTS, ROOT, manifests
from e2e.conftest import PROFILE
from e2e.manifests import job
from e2e.space import CONTROLLER, Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS, TORCHRUN_QUEUES
from torchrun_api.names import JOB_LABEL, TRAINER_CONTAINER
from torchrun_cluster import binaries, images

CHART = ROOT / "manifests" / "helm" / "torchrun-controller"
GPT = ROOT / "examples" / "gpt"
NAME = "torchrun-controller"
SBOM = "/opt/torchrun/sbom.cdx.json"


class Release:
    """The chart in the namespace of a test, for this namespace only."""

    def __init__(self, space: Space) -> None:
        self._space = space
        repository, _, tag = space.cluster.controller.rpartition(":")
        self._image = f"--set=image.repository={repository},image.tag={tag}"

    def helm(self, *arguments: str) -> str:
        """Run helm in the namespace. Fails the test with its output."""
        ended = subprocess.run(
            [binaries.ensure(["helm"])["helm"], "-n", self._space.name, *arguments],
            env={**os.environ, "KUBECONFIG": str(self._space.cluster.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def upgrade(self, *options: str) -> None:
        """Install or upgrade the release."""
        once = ("--set=singleNamespace=true", "--set=crds.install=false", self._image)
        self.helm("upgrade", "--install", NAME, str(CHART), *once, *options)

    def rolled_out(self) -> None:
        """Wait for all replicas of the current revision."""
        deployment = f"deployment/{NAME}"
        self._space.kubectl("rollout", "status", deployment, "--timeout=180s")


@contextmanager
def helm_alone(space: Space) -> Iterator[Release]:
    """The release, without the controller of the whole cluster."""
    with controller.no_deployment(space.cluster):
        release = Release(space)
        release.upgrade("--wait", "--timeout=180s")
        try:
            yield release
        finally:
            print(space.kubectl("logs", f"deployment/{NAME}", "--tail=40", check=False))
            space.kubectl("delete", "torchrunqueues,torchrunjobs", "--all", "--timeout=180s")
            release.helm("uninstall", "--ignore-not-found", NAME)


def restricted(space: Space) -> None:
    space.kubectl("label", "namespace", space.name, "--overwrite", f"{PROFILE}=restricted")


def runs_the_example(space: Space) -> None:
    """Run examples/gpt unchanged, with its queue, under the profile."""
    made: JsonObject = yaml.safe_load((GPT / "queue.yaml").read_text())
    made["spec"] |= {"image": space.cluster.trainer, "podSecurity": "restricted"}
    space.apply(made)
    command = "python train.py --steps 20 --log-every 5"
    run = space.submit(GPT, command, "--queue", "cpu", "--nodes", "2", "--name", "gpt")
    assert run.returncode == 0
    assert "finished 20 steps" in run.stdout
    assert space.get(TORCHRUN_JOBS, "gpt")["status"]["phase"] == "Succeeded"


def uids(space: Space) -> dict[str, str]:
    """UIDs of the child Job and the workers."""
    return {
        item["metadata"]["name"]: item["metadata"]["uid"]
        for kind in (JOBS, PODS)
        for item in space.api.get(kind.path(space.name)).raise_for_status().json()["items"]
        if JOB_LABEL in item["metadata"].get("labels", {})
    }


@pytest.mark.long
def test_install_by_kustomize_for_the_whole_cluster(space: Space) -> None:
    restricted(space)
    runs_the_example(space)


def test_install_by_helm_for_one_namespace(space: Space) -> None:
    restricted(space)
    with helm_alone(space):
        runs_the_example(space)
        assert not space.cluster.kubectl(
            *("get", "clusterroles,clusterrolebindings", "-o", "name"),
            *("-l", f"app.kubernetes.io/instance={NAME}"),
        ).stdout


@pytest.mark.long
def test_an_upgrade_does_not_affect_a_running_job(space: Space) -> None:
    with helm_alone(space) as release:
        sleep = ["python3", "-c", "import time; time.sleep(45)"]
        space.apply(job("lasting", "plain", sleep, 2))
        space.wait_phase("lasting", "Running")
        before = uids(space)
        assert len(before) == 3
        release.upgrade("--set=settings.logLevel=debug")
        release.rolled_out()
        assert space.get(TORCHRUN_JOBS, "lasting")["status"]["phase"] == "Running"
        assert uids(space) == before
        space.wait_phase("lasting", "Succeeded")
        assert uids(space) == before


def applied(space: Space, image: str) -> None:
    """`kubectl apply` the manifests with this image, and wait for its pod."""
    made = manifests(space.cluster, image)
    space.cluster.kubectl("apply", "--server-side", "-f", "-", stdin=made)
    space.cluster.kubectl("rollout", "status", *CONTROLLER, "--timeout=180s")
    (container,) = controller.pod_of_deployment(space)["spec"]["containers"]
    assert container["image"] == image


@pytest.mark.long
@pytest.mark.timeout(900)
def test_another_image_does_not_affect_a_running_job(space: Space) -> None:
    cluster, again = space.cluster, f"{CONTROLLER_IMAGE}-again"
    if cluster.local is None:
        pytest.skip("a second image has to be loaded into the node")
    tag, version = f"docker.io/library/{again}", {"VERSION": again.rpartition(":")[2]}
    archive = images.build(ROOT / "Dockerfile", ROOT, tag, version, IMAGE_INPUTS)
    cluster.local.load_image(archive)
    wait = [
        "python3",
        "-c",
        "import os, time\nwhile not os.path.exists('/tmp/end'): time.sleep(0.2)",
    ]
    space.apply(job("lasting", "plain", wait, 2))
    space.wait_phase("lasting", "Running")
    before = uids(space)
    assert len(before) == 3
    try:
        applied(space, again)
        assert uids(space) == before
        space.apply(job("next", "plain", ["true"]))
        space.wait_phase("next", "Succeeded")
        of_next = next(
            pod
            for pod in space.api.get(PODS.path(space.name)).raise_for_status().json()["items"]
            if pod["metadata"]["labels"][JOB_LABEL] == "next"
        )
        assert [c["image"] for c in of_next["spec"]["initContainers"]] == [again]
        for pod in (name for name in before if name != "lasting"):
            space.kubectl("exec", pod, "-c", TRAINER_CONTAINER, "--", "touch", "/tmp/end")
        space.wait_phase("lasting", "Succeeded")
        assert before.items() <= uids(space).items()
    finally:
        applied(space, cluster.controller)


@pytest.mark.long
def test_a_wrong_setting_is_in_the_pod_status_and_has_no_effect(space: Space) -> None:
    with helm_alone(space) as release:
        release.upgrade("--set=settings.leaseDuration=5s")
        message = ended_with(space)
        assert message.startswith("torchrun-controller: --lease-duration/")
        assert message.count("\n") <= 1
        # Old pods stay until a new one is ready.
        space.apply(job("runs", "plain", ["true"]))
        space.wait_phase("runs", "Succeeded")
        release.helm("rollback", NAME)
        release.rolled_out()


def ended_with(space: Space, seconds: float = 60) -> str:
    """The termination message of the first controller that ended by itself."""
    deadline = time.monotonic() + seconds
    selector = {"labelSelector": controller.SELECTOR}
    while time.monotonic() < deadline:
        listed = space.api.get(PODS.path(space.name), params=selector).raise_for_status().json()
        for pod in listed["items"]:
            for status in pod["status"].get("containerStatuses", ()):
                for state in (status["state"], status.get("lastState", {})):
                    if message := state.get("terminated", {}).get("message"):
                        return message
        time.sleep(0.5)
    raise AssertionError("no controller has ended")


@pytest.mark.long
def test_uninstalling_keeps_the_objects_of_users(space: Space) -> None:
    with helm_alone(space) as release:
        space.apply(job("runs", "plain", ["true"]))
        space.wait_phase("runs", "Succeeded")
        finalizers = space.get(TORCHRUN_QUEUES, "plain")["metadata"]["finalizers"]
        assert finalizers == ["torchrun.ai/queue"]
        release.helm("uninstall", NAME, "--wait")
        assert space.get(TORCHRUN_JOBS, "runs")["status"]["phase"] == "Succeeded"
        space.kubectl("delete", "trq", "plain", "--wait=false")
        # docs/install.md describes queues whose finalizer no controller removes.
        patch = json.dumps({"metadata": {"finalizers": []}})
        space.kubectl("patch", "trq", "plain", "--type=merge", "-p", patch)
        space.kubectl("wait", "trq/plain", "--for=delete", "--timeout=180s")


@pytest.mark.long
def test_the_image_adds_little_to_its_base(space: Space) -> None:
    if space.cluster.local is None:
        pytest.skip("Docker's archives are not compressed, and say nothing of what a node pulls")
    tag = f"docker.io/library/{CONTROLLER_IMAGE}"
    archive = images.build(ROOT / "Dockerfile", ROOT, tag, inputs=IMAGE_INPUTS)
    own = images.own_size(archive, images.base())
    print(f"{own / 1e6:.1f} MB, without git and ssh, which the local base has")
    assert own < 60e6


@pytest.mark.long
def test_the_image_has_a_bill_of_materials(space: Space) -> None:
    read = ["python3", "-c", f"print(open('{SBOM}').read())"]
    space.apply(job("reads", "plain", read))
    space.wait_phase("reads", "Succeeded")
    pod = next(name for name in uids(space) if name.startswith("reads-0"))
    log = space.kubectl("logs", pod, "-c", TRAINER_CONTAINER)
    bill = json.loads(log[log.index("{") :])
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == NAME
    locked = (ROOT / "requirements" / "controller.txt").read_text()
    listed = {
        (part["name"].lower().replace("_", "-"), part["version"]) for part in bill["components"]
    }
    pinned = [line.split()[0].split("==") for line in locked.splitlines() if "==" in line]
    assert {(name, version) for name, version in pinned} <= listed
