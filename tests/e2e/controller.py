"""The controller as a process that can be killed: on this machine, or in its Deployment's pod."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from bodies import Body
from e2e.cluster import Cluster
from e2e.history import History
from e2e.space import CONTROLLER, Space
from e2e.sync_pod import SyncPod, is_ready

NAMESPACE = "torchrun-system"
SELECTOR = "app.kubernetes.io/name=torchrun-controller"


class HostController:
    """A controller for one namespace, run from the checkout."""

    def __init__(self, space: Space, log: Path) -> None:
        self._command = [
            *(sys.executable, "-m", "torchrun_controller", "--listen-port=0"),
            *("--leader-election=false", f"--namespace={space.name}"),
            *("--runtime-image", space.cluster.controller),
        ]
        self._environment = space.cluster.environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = 0

    @contextmanager
    def running(self) -> Iterator["HostController"]:
        """Run until the end of the block."""
        self.start()
        try:
            yield self
        finally:
            self._end(signal.SIGTERM)
            print(self._log.read_text())

    def start(self) -> None:
        """Start it, without waiting."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """Kill it with SIGKILL, and start another at once."""
        self._end(signal.SIGKILL)
        self.kills += 1
        self.start()

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.poll() is None, f"it had ended by itself; see {self._log}"
        self._process.send_signal(number)
        self._process.wait(60)


@contextmanager
def no_deployment(cluster: Cluster) -> Iterator[None]:
    """Scale the Deployment to zero until the end of the block."""
    scale = ("scale", *CONTROLLER)
    pods = ("-n", NAMESPACE, "pods", "-l", SELECTOR)
    cluster.kubectl(*scale, "--replicas=0")
    cluster.kubectl("wait", *pods, "--for=delete", "--timeout=180s")
    try:
        yield
    finally:
        cluster.kubectl(*scale, "--replicas=1")
        cluster.kubectl("rollout", "status", *CONTROLLER, "--timeout=180s")


def pod_of_deployment(space: Space) -> Body:
    """The only pod of the Deployment, without pods that a rollout terminates."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    listed = space.api.get(path, params={"labelSelector": SELECTOR}).json()["items"]
    pod: Body
    (pod,) = (pod for pod in listed if "deletionTimestamp" not in pod["metadata"])
    return pod


def kill_in_pod(pod: Body) -> None:
    """Kill the process of the container with SIGKILL, like the OOM killer."""
    container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    killed = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and container in (entry / "cgroup").read_text():
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    assert killed, f"no process of container {container} on this machine"


def metrics(space: Space) -> dict[str, float]:
    """The values of /metrics of the controller, by series."""
    name = pod_of_deployment(space)["metadata"]["name"]
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:8080/proxy/metrics"
    lines = space.api.get(path).raise_for_status().text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {series: float(value) for series, _, value in pairs}


def wait_restarted(space: Space, restarts: int, seconds: float = 180) -> None:
    """Wait until the container is ready after `restarts` restarts."""
    name = pod_of_deployment(space)["metadata"]["name"]
    for field in (f"restartCount}}={restarts}", "ready}=true"):
        condition = f"jsonpath={{.status.containerStatuses[0].{field}"
        space.cluster.kubectl(
            *("wait", "-n", NAMESPACE, f"pod/{name}", f"--for={condition}"),
            f"--timeout={seconds:.0f}s",
            seconds=seconds + 10,
        )


def uploading(space: Space, pods: History, pod: str, seconds: float = 180) -> None:
    """Wait until the sync pod is ready and has the first bytes of an upload.

    The pod may have ended by then, because a small upload takes less than a second.
    """
    pods.until(lambda state: is_ready(state) or ended(state), seconds, pod)
    deadline = time.monotonic() + seconds
    while not any(ended(state) for state in pods.states(pod)):
        with suppress(httpx.HTTPStatusError):  # the pod ends during the request
            if SyncPod(space, pod).state()["offset"]:
                return
        assert time.monotonic() < deadline, "no upload started"


def ended(pod: Body) -> bool:
    """Whether all containers have terminated."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
