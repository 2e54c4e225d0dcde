"""A user's directory and kubeconfig, and an API server in memory behind the proxy of kubectl."""

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.logs import follow

from .api_server import ApiServer

READY = [{"type": "WorkspaceReady", "status": "True"}]
LABELS = {"torchrun-job-name": "run"}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with ApiServer().running() as running:
        running.put("torchrunqueues", "q")
        yield running


@dataclass
class Laptop:
    """A user's directory and kubeconfig."""

    server: ApiServer
    kubeconfig: Path

    def run(self, *arguments: str, namespace: str = "ns") -> Result:
        command, *rest = arguments
        flags = [f"--kubeconfig={self.kubeconfig}", *(["-n", namespace] if namespace else [])]
        return CliRunner().invoke(cli, [command, *flags, *rest], catch_exceptions=False)

    def job(self, name: str, **parts: object) -> None:
        """Store a job with these fields."""
        spec = {"jobQueue": "q", "numNodes": 2, "volumes": {"workspace": {"source": "zip"}}}
        self.server.put("torchrunjobs", name, **{"spec": spec, **parts})

    def worker(self, job: str, node: int, attempt: int = 0, *lines: str, **state: object) -> str:
        """Store a worker pod with its log, running by default. Returns its name."""
        labels = {
            "torchrun-job-name": job,
            "torchrun.ai/attempt": str(attempt),
            "app.kubernetes.io/component": "worker",
            "batch.kubernetes.io/job-completion-index": str(node),
        }
        name = f"{job}-r{attempt}-{node}"
        status = {"name": "trainer", "state": state or {"running": {}}}
        phase = "Running" if not state or "running" in state else "Failed"
        self.server.put(
            "pods",
            name,
            metadata={"labels": labels},
            spec={"nodeName": f"host-{node}"},
            status={"phase": phase, "containerStatuses": [status]},
        )
        self.server.logs[name] = list(lines)
        return name

    def once_watched(self, change: Callable[[], object]) -> None:
        """Call the function at the first watch of jobs."""
        seen: list[str] = []

        def hook(request: web.Request) -> None:
            if request.query.get("watch") and request.path.endswith("torchrunjobs") and not seen:
                seen.append(request.path)
                threading.Timer(0.1, change).start()

        self.server.hooks.append(hook)


@pytest.fixture
def laptop(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laptop:
    monkeypatch.setattr(follow, "_TICK_SECONDS", 0.05)
    project = tmp_path / "Project"
    project.mkdir()
    (project / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(project)
    path = tmp_path / "kubeconfig"
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {}}],
    }
    path.write_text(json.dumps(config))
    return Laptop(server, path)


def play_controller(server: ApiServer, result: str = "Succeeded") -> None:
    """Move a job from its creation to this result when its upload arrives."""

    def created(name: str) -> None:
        job = server.objects["torchrunjobs", name]
        digest = job["metadata"]["annotations"]  # type: ignore[index,call-overload]
        server.put("torchrunjobs", name, status={"phase": "Syncing", "reason": "WaitingForUpload"})
        state = {"name": "sync", "ready": True, "state": {"running": {}}}
        labels = {"torchrun-job-name": name, "app.kubernetes.io/component": "sync"}
        server.put(
            "pods",
            f"{name}-sync-0",
            metadata={"labels": labels, "annotations": digest},
            status={"phase": "Running", "containerStatuses": [state]},
        )

    def uploaded() -> None:
        for rank in (0, 1):
            pod = f"run-{rank}"
            server.logs[pod] = [
                f"2026-01-01T00:00:0{step}.00000000{rank}Z step {step}\n" for step in range(3)
            ]
            labels = {
                **LABELS,
                "app.kubernetes.io/component": "worker",
                "batch.kubernetes.io/job-completion-index": str(rank),
            }
            ended = {"name": "trainer", "state": {"terminated": {"exitCode": 0}}}
            server.put(
                "pods",
                pod,
                metadata={"labels": labels},
                status={"phase": "Succeeded", "containerStatuses": [ended]},
            )
        queued = {"phase": "Queued", "reason": "Why", "message": "text", "conditions": READY}
        server.put("torchrunjobs", "run", status=queued)
        server.put("torchrunjobs", "run", status={"phase": result, "conditions": READY})

    server.on_create, server.on_upload = created, uploaded


def waiting_job(server: ApiServer, **status: object) -> None:
    server.put(
        "torchrunjobs",
        "run",
        spec={"volumes": {"workspace": {"source": "zip"}}},
        status={"phase": "Syncing", **status},
    )


def interrupt_at(server: ApiServer, path: str) -> None:
    """Press Ctrl-C at the first request of this path."""
    pressed: list[str] = []

    def press(request: web.Request) -> None:
        if path in request.path and not pressed:
            pressed.append(path)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    server.hooks.append(press)
