"""The controller as a separate process, and an HTTP client for the API server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx

from log_files import read_complete_lines
from torchrun_cluster import LocalCluster
from torchrun_controller.client.credentials import tls_context

T = TypeVar("T")

CRDS = Path(__file__).parents[2] / "manifests" / "crd"
IMAGE = "runtime:test"
NO_ELECTION = ("--leader-election", "false")
POLICY = "ValidatingAdmissionPolicy"
NO_COMMAND = """
apiVersion: torchrun.ai/v1alpha1
kind: TorchrunJob
metadata: {name: probe}
spec: {jobQueue: none, numNodes: 1, command: 5}
"""
PATIENCE = 180.0  # seconds, long enough for a busy machine


@cache
def install_crds(cluster: LocalCluster) -> None:
    """Install the generated CRDs with their admission policy, and wait until both are active."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    # kubectl fails for an object without any conditions.
    wait = ("wait", "--for=condition=Established", "crd", "--all")
    eventually("the CRDs are served", lambda: cluster.kubectl(*wait, check=False).returncode == 0)
    # Neither discovery nor an admission policy reports when the API server has loaded it.
    probe = ("create", "--dry-run=server", "-f", "-")
    eventually(
        "the admission policy is in force",
        lambda: POLICY in cluster.kubectl(*probe, stdin=NO_COMMAND, check=False).stderr,
    )


def eventually(what: str, look: Callable[[], T | None], seconds: float = PATIENCE) -> T:
    """Poll until the result is truthy, and return it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = look()
        if seen:
            return seen
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Api:
    """An HTTP client of the API server with the certificate of the administrator."""

    def __init__(self, cluster: LocalCluster) -> None:
        context = tls_context(str(cluster.ca_file))
        context.load_cert_chain(cluster.client_certificate, cluster.client_key)
        self.client = httpx.Client(base_url=cluster.server, verify=context, timeout=PATIENCE)

    def close(self) -> None:
        self.client.close()

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        return None if answer.status_code == 404 else answer.raise_for_status().json()

    def text(self, path: str) -> str:
        return self.client.get(path).raise_for_status().text

    def items(self, path: str, selector: str = "") -> list[Any]:
        answer = self.client.get(path, params={"labelSelector": selector})
        items: list[Any] = answer.raise_for_status().json()["items"]
        return items

    def create(self, path: str, body: object) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def patch(self, path: str, body: object) -> Any:
        kind = {"Content-Type": "application/merge-patch+json"}
        answer = self.client.patch(path, content=json.dumps(body), headers=kind)
        assert answer.is_success, answer.text
        return answer.json()

    def delete(self, path: str) -> None:
        self.client.delete(path).raise_for_status()


class ControllerProcess:
    """`torchrun-controller` for a cluster. It can be started again after its end."""

    def __init__(self, cluster: LocalCluster, folder: Path, *arguments: str) -> None:
        self.log = folder / "controller.log"
        self._command = [
            *(sys.executable, "-m", "torchrun_controller"),
            *("--kubeconfig", str(cluster.kubeconfig), "--runtime-image", IMAGE),
            *("--listen-address", "127.0.0.1", "--listen-port", "0", "--log-format", "json"),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0

    def through(self, kubeconfig: Path) -> None:
        """Use this kubeconfig at the next start."""
        self._command[self._command.index("--kubeconfig") + 1] = str(kubeconfig)

    def with_program(self, program: str) -> None:
        """Run this Python program with the same arguments instead, from the next start on."""
        self._command[1 : self._command.index("--kubeconfig")] = ["-c", program]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._began = self.log.stat().st_size if self.log.exists() else 0
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TORCHRUN_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=environ
            )

    def lines(self) -> list[dict[str, Any]]:
        """The log lines of the current process."""
        lines = read_complete_lines(self.log, self._began)
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def wait_for_line(self, message: str) -> dict[str, Any]:
        return eventually(
            f"{message!r} in the log:\n{self.log.read_text()}",
            lambda: next((line for line in self.lines() if line["message"] == message), None),
        )

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @contextmanager
    def running(self) -> Iterator["ControllerProcess"]:
        """Start it, and stop it cleanly at the end."""
        self.start()
        try:
            yield self
        finally:
            if self.is_running():
                self.wait_for_line("serving")  # before that line, signal handlers are not installed
                self.send(signal.SIGTERM)
                try:
                    code = self.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    self.kill()
                    raise
                assert code == 0, f"exit code {code}\n{self.log.read_text()[-3000:]}"
