"""The plugin's commands on a real API server. The tests set phases, as no controller runs."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import anyio
import pytest
import yaml

from integration.controller_process import eventually, install_crds
from kubectl_torchrun.cluster.client import connect
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.kubectl import Target, proxy
from torchrun_api.json import JsonObject
from torchrun_cluster import LocalCluster, Size

USERS = Path(__file__).parents[2] / "manifests" / "rbac" / "users.yaml"
SECONDS = 180  # of a wait for another process; long, for a busy machine
NUMBERS = itertools.count()


class Laptop:
    """A project directory, a namespace with queues, and the plugin."""

    def __init__(self, cluster: LocalCluster, namespace: str, project: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.project = project
        self.kubeconfig = str(cluster.kubeconfig)

    def queues(self, *names: str) -> None:
        for name in names:
            queue = {
                "apiVersion": "torchrun.ai/v1alpha1",
                "kind": "TorchrunQueue",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {},
            }
            self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(queue))

    def start(self, *arguments: str) -> "Running":
        command = [sys.executable, "-m", "kubectl_torchrun", *arguments]
        flags = [f"--kubeconfig={self.kubeconfig}", "-n", self.namespace]
        before = arguments.index("--") if "--" in arguments else len(arguments)
        command = [*command[: 3 + before], *flags, *command[3 + before :]]
        return Running(
            subprocess.Popen(
                command,
                cwd=self.project,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return self.start(*arguments).end()

    def job(self, name: str) -> JsonObject:
        found = self.cluster.kubectl("get", "tj", name, "-n", self.namespace, "-o", "json").stdout
        job: JsonObject = json.loads(found)
        return job

    def set_status(self, name: str, **status: object) -> None:
        """Write a status for the present spec, as the controller does."""
        job = self.cluster.kubectl("get", "tj", name, "-n", self.namespace, "-o", "json").stdout
        status = {"observedGeneration": json.loads(job)["metadata"]["generation"], **status}
        self.cluster.kubectl(
            "patch", "tj", name, "-n", self.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": status}),
        )  # fmt: skip


class Running:
    """A running plugin command. Its stderr is read continuously."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._came = threading.Condition()
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(process.stderr,))
        self._reader.start()

    def says(self, pattern: str) -> re.Match[str]:
        """Wait for a line on stderr that matches the pattern."""
        found: list[re.Match[str]] = []

        def there() -> bool:
            found.extend(match for line in self._lines if (match := re.search(pattern, line)))
            return bool(found)

        with self._came:
            assert self._came.wait_for(there, SECONDS), f"no {pattern!r} in {self._lines}"
        return found[0]

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        assert self.process.stdout is not None
        code = self.process.wait(SECONDS)
        self._reader.join()
        with self.process.stdout as stdout:
            return code, stdout.read(), "\n".join(self._lines)

    def _read(self, stderr: IO[str]) -> None:
        with stderr:
            for line in stderr:
                with self._came:
                    self._lines.append(line.rstrip("\n"))
                    self._came.notify_all()


@pytest.fixture
def laptop(crds: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Laptop]:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.originalname.removeprefix("test_"))
    namespace = f"{name[:50].strip('-')}-{next(NUMBERS)}"
    crds.kubectl("create", "namespace", namespace)
    project = tmp_path / "My Project"
    project.mkdir()
    (project / "train.py").write_text("print('hello')\n")
    yield Laptop(crds, namespace, project)
    crds.kubectl("delete", "namespace", namespace, "--wait=false")


READY = [
    {
        "type": "WorkspaceReady",
        "status": "True",
        "reason": "Synced",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
]


def test_a_dry_run_prints_a_valid_object(laptop: Laptop) -> None:
    laptop.queues("only")
    arguments = ["--dry-run", "--gpus", "8", "-e", "LR=0.1", "--", "python", "train.py", "a b"]
    code, out, err = laptop.run("submit", *arguments)
    assert code == 0
    job = yaml.safe_load(out)
    digest = job["metadata"]["annotations"]["torchrun.ai/workspace-sha256"]
    assert re.fullmatch(r"[0-9a-f]{64}", digest)
    assert job["metadata"]["name"].startswith("my-project-")
    assert job["spec"] == {
        "jobQueue": "only",
        "numGPUs": 8,
        "command": "python train.py 'a b'",
        "env": [{"name": "LR", "value": "0.1"}],
        "volumes": {"workspace": {"source": "zip"}},
    }
    assert "1 file in My Project" in err
    laptop.cluster.kubectl("apply", "-f", "-", stdin=out)


def test_schema_errors_name_the_field(laptop: Laptop) -> None:
    laptop.queues("only")
    code, _, err = laptop.run("submit", "--gpus", "200000", "python train.py")
    assert code == 2
    assert "spec.numGPUs" in err


@pytest.mark.parametrize(
    ("queues", "arguments", "message"),
    [
        ([], [], " has no TorchrunQueue."),
        (["a", "b"], [], "--queue a\n  --queue b"),
        (["a", "b"], ["--queue", "c"], "TorchrunQueue c not found in namespace"),
        (["a"], ["--name", "Not_A_Name"], "is not a valid job name"),
        (["a"], ["--name", "x" * 46], "has 46 characters"),
        (["a"], ["--nodes", "1", "--gpus", "1"], "--nodes and --gpus are mutually exclusive"),
        (["a"], ["--env", "LR"], "is not NAME=VALUE"),
        (["a"], ["--epochs", "3"], "add -- before it"),
    ],
    ids=lambda value: None,
)
def test_wrong_arguments_are_reported_before_the_creation(
    laptop: Laptop, queues: list[str], arguments: list[str], message: str
) -> None:
    laptop.queues(*queues)
    code, out, err = laptop.run("submit", *arguments, "python train.py")
    assert (code, out) == (2, "")
    assert message in err
    assert laptop.cluster.kubectl("get", "tj", "-n", laptop.namespace, "-o", "name").stdout == ""


def test_an_existing_name(laptop: Laptop) -> None:
    laptop.queues("a")
    laptop.run("submit", "--name", "run", "--upload-timeout", "1", "python train.py")
    code, _, err = laptop.run("submit", "--name", "run", "python train.py")
    assert code == 2
    assert "already exists" in err
    assert "another --name" in err


def test_without_a_controller_submit_reports_the_wait_and_how_to_resume(laptop: Laptop) -> None:
    laptop.queues("a")
    code, out, err = laptop.run(
        "submit", "--name", "run", "--upload-timeout", "12", "python train.py"
    )
    assert (code, out) == (3, "")
    assert "no controller has processed the job yet" in err
    assert f"kubectl torchrun sync run -n {laptop.namespace}" in err
    assert f"kubectl torchrun cancel run -n {laptop.namespace}" in err
    assert laptop.job("run")["metadata"]["annotations"]["torchrun.ai/workspace-sha256"]  # type: ignore[index,call-overload]


def test_ctrl_c_before_the_upload_prints_how_to_resume(laptop: Laptop) -> None:
    laptop.queues("a")
    running = laptop.start("submit", "--name", "run", "python train.py")
    running.says("Created torchrunjob.torchrun.ai/run")
    running.process.send_signal(signal.SIGINT)
    code, _, err = running.end()
    assert code == 130
    assert "Stopped before the upload was complete" in err
    assert "kubectl torchrun sync run" in err
    assert laptop.job("run")


@pytest.mark.parametrize(("phase", "code"), [("Succeeded", 0), ("Failed", 1), ("TimedOut", 1)])
def test_the_exit_code_is_the_result_of_the_job(laptop: Laptop, phase: str, code: int) -> None:
    laptop.queues("a")
    running = laptop.start("submit", "--name", "run", "python train.py")
    running.says("Created")
    laptop.set_status("run", phase="Queued", reason="Waiting", message="no", conditions=READY)
    running.says("Queued    attempt 0: Waiting: no|Queued    Waiting: no")
    laptop.set_status("run", phase="Running", reason="Up", message="2/2 ready", attempt=1)
    running.says("Running   attempt 1: Up: 2/2 ready")
    failure = {"node": "n", "rank": 3, "reason": "Signaled", "message": "killed"}
    laptop.set_status("run", phase=phase, reason="Why", message="text", lastFailure=failure)
    ended, out, err = running.end()
    assert (ended, out) == (code, "")
    assert f"{phase:<9} Why: text" in err
    assert ("Root cause (rank 3, n): Signaled: killed" in err) == (code == 1)
    assert "\x1b" not in err


def test_ctrl_c_while_following_does_not_stop_the_job(laptop: Laptop) -> None:
    laptop.queues("a")
    running = laptop.start("submit", "--name", "run", "python train.py")
    running.says("Created")
    laptop.set_status("run", phase="Running", conditions=READY)
    running.says("Running")
    running.process.send_signal(signal.SIGINT)
    code, _, err = running.end()
    assert code == 130
    assert "Detached. The job continues." in err
    assert f"kubectl torchrun logs run --follow -n {laptop.namespace}" in err
    assert laptop.job("run")["status"]["phase"] == "Running"  # type: ignore[index,call-overload]


def test_a_deleted_job_ends_the_command(laptop: Laptop) -> None:
    laptop.queues("a")
    running = laptop.start("submit", "--name", "run", "python train.py")
    running.says("Created")
    laptop.cluster.kubectl("delete", "tj", "run", "-n", laptop.namespace)
    code, _, err = running.end()
    assert code == 1
    assert "was deleted" in err


def test_an_invalid_job_ends_the_command_before_the_upload(laptop: Laptop) -> None:
    laptop.queues("a")
    running = laptop.start("submit", "--name", "run", "python train.py")
    running.says("Created")
    laptop.set_status("run", phase="Pending", reason="InvalidSpec", message="5 of 4 GPUs")
    code, _, err = running.end()
    assert code == 1
    assert "The spec of the job is invalid: 5 of 4 GPUs" in err
    assert "kubectl torchrun cancel run" in err


def test_json_output(laptop: Laptop) -> None:
    laptop.queues("a")
    running = laptop.start("submit", "--name", "run", "-o", "name", "python train.py")
    running.says("Created")
    laptop.set_status("run", phase="Queued", conditions=READY)
    code, out, err = running.end()
    assert (code, out) == (0, "torchrunjob.torchrun.ai/run\n")
    assert "kubectl torchrun logs run --follow" in err


def test_sync_announces_the_current_files(laptop: Laptop) -> None:
    laptop.queues("a")
    laptop.run("submit", "--name", "run", "--upload-timeout", "1", "python train.py")
    key = "torchrun.ai/workspace-sha256"
    first = laptop.job("run")["metadata"]["annotations"][key]  # type: ignore[index,call-overload]
    code, _, err = laptop.run("sync", "run", "--upload-timeout", "1")
    assert code == 3
    assert "expects other content" not in err
    (laptop.project / "train.py").write_text("print('fixed')\n")
    code, _, err = laptop.run("sync", "run", "--upload-timeout", "1")
    assert code == 3
    assert "expects other content" in err
    second = laptop.job("run")["metadata"]["annotations"][key]  # type: ignore[index,call-overload]
    assert second != first
    laptop.set_status("run", phase="Running", conditions=READY)
    (laptop.project / "train.py").write_text("print('fixed again')\n")
    code, out, err = laptop.run("sync", "run", "--upload-timeout", "1")
    assert (code, out) == (3, "")  # no sync pod is created, as no controller runs
    assert "expects other content" not in err
    assert "No sync pod was ready within 1 s" in err
    assert "Job run continues with its current files. To upload the directory:" in err
    assert f"  kubectl torchrun sync run -n {laptop.namespace}" in err
    job = laptop.job("run")
    third = job["metadata"]["annotations"][key]  # type: ignore[index,call-overload]
    assert third not in (first, second)  # by which the controller would create one
    assert "torchrun.ai/workspace-revision" not in job["metadata"]["annotations"]  # type: ignore[index,call-overload,operator]
    assert job["status"]["phase"] == "Running"  # type: ignore[index,call-overload]


def test_logs_of_a_job_without_pods(laptop: Laptop) -> None:
    laptop.queues("a")
    laptop.run("submit", "--name", "run", "--upload-timeout", "1", "python train.py")
    laptop.set_status("run", phase="Queued", reason="Unschedulable", message="no GPUs")
    assert laptop.run("logs", "run")[0] == 2
    assert "It is Queued. Unschedulable: no GPUs" in laptop.run("logs", "run")[2]
    code, _, err = laptop.run("logs", "nothing")
    assert code == 2
    assert '"nothing" not found' in err


def as_user(laptop: Laptop, user: str, directory: Path) -> None:
    """A kubeconfig that acts as this user."""
    config = json.loads(Path(laptop.kubeconfig).read_text())
    for entry in config["users"]:
        entry["user"]["as"] = user
    path = directory / "kubeconfig"
    path.write_text(json.dumps(config))
    laptop.kubeconfig = str(path)


def test_the_role_edit_is_enough_and_its_absence_is_reported(
    laptop: Laptop, tmp_path: Path
) -> None:
    laptop.queues("a")
    laptop.cluster.kubectl("apply", "-f", str(USERS))
    as_user(laptop, "alice", tmp_path)
    code, _, err = laptop.run("submit", "python train.py")
    assert code == 4
    assert 'User "alice" cannot' in err
    assert f"the role edit in namespace {laptop.namespace}" in err
    bind = ["create", "rolebinding", "alice", "--clusterrole=edit", "--user=alice"]
    laptop.cluster.kubectl(*bind, "-n", laptop.namespace)
    may = ("auth", "can-i", "create", "torchrunjobs", "--as=alice", "-n", laptop.namespace)
    # A controller adds the rules to the role edit.
    eventually("the right", lambda: laptop.cluster.kubectl(*may, check=False).returncode == 0)
    running = laptop.start("submit", "--queue", "a", "--name", "run", "python train.py")
    running.says("Created")
    laptop.set_status("run", phase="Succeeded", conditions=READY)
    assert running.end()[0] == 0
    for verb in ("get", "update"):
        asked = ["auth", "can-i", verb, "pods/proxy", "--as=alice", "-n", laptop.namespace]
        assert laptop.cluster.kubectl(*asked).stdout.strip() == "yes"


async def test_watches_survive_a_restart_of_the_api_server(tmp_path: Path) -> None:
    name = f"test-plugin-{os.getpid()}"
    with LocalCluster(name=name, size=Size.CONTROL_PLANE) as cluster:
        install_crds(cluster)
        laptop = Laptop(cluster, "default", tmp_path)

        async def until_phase(job_watch: JobWatch, phase: str) -> None:
            with anyio.fail_after(SECONDS):
                while job_watch.job is None or job_watch.job.status.phase != phase:
                    await job_watch.next_change(SECONDS)

        job = {
            "apiVersion": "torchrun.ai/v1alpha1",
            "kind": "TorchrunJob",
            "metadata": {"name": "run"},
            "spec": {"jobQueue": "a", "numNodes": 1, "command": "x"},
        }
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(job))
        with proxy(Target(kubeconfig=str(cluster.kubeconfig))) as socket:
            async with connect(socket, "default") as api, anyio.create_task_group() as tasks:
                job_watch = JobWatch(api, "run")
                tasks.start_soon(job_watch.run)
                laptop.set_status("run", phase="Queued")
                await until_phase(job_watch, "Queued")
                cluster.restart("kube-apiserver")
                laptop.set_status("run", phase="Running")
                await until_phase(job_watch, "Running")
                cluster.kubectl("delete", "tj", "run")
                with anyio.fail_after(SECONDS):
                    while job_watch.job is not None:
                        await job_watch.next_change(SECONDS)
                tasks.cancel_scope.cancel()
