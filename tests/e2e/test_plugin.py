"""The plugin with a real sync pod and real workers: logs, exit codes, broken uploads, Ctrl-C."""

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest

from e2e.manifests import queue
from e2e.space import Space, until
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS
from torchrun_api.names import SYNC_PORT, WORKSPACE_SHA256

SECONDS = 180
WEIGHTS = Random(1).randbytes(64 << 20)
CHECK = f"""
import hashlib
held = hashlib.sha256(open("weights.bin", "rb").read()).hexdigest()
assert held == "{hashlib.sha256(WEIGHTS).hexdigest()}", held
print("every byte is here", flush=True)
"""
STEPS = """
import os, sys, time
rank = os.environ["NODE_RANK"]
for step in range(int(sys.argv[1])):
    print("step", step, "of node", rank, flush=True)
    time.sleep(0.2)
sys.exit(3 if rank in sys.argv[2:] else 0)
"""
# With `exec` the line runs without torchrun: the image has no torch.
RUN = "exec python3 train.py"


def project(directory: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = directory / name.replace("_", ".")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def plugin(space: Space, directory: Path, *arguments: str) -> tuple[int, str, str]:
    with started(space, directory, *arguments) as process:
        out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


@contextmanager
def started(space: Space, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        ["kubectl", "torchrun", *arguments, "-n", space.name],
        cwd=directory,
        env=space.cluster.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def sync_state(space: Space, job: str) -> dict[str, object]:
    """The upload state of the sync pod; empty while there is no pod."""
    try:
        annotations = space.get(TORCHRUN_JOBS, job)["metadata"]["annotations"]
        answer = space.api.get(
            f"{PODS.path(space.name, f'{job}-sync-0')}:{SYNC_PORT}/proxy/v1/upload",
            headers={"X-Torchrun-Workspace": annotations[WORKSPACE_SHA256]},
        )
        body: dict[str, object] = answer.raise_for_status().json()
    except (httpx.HTTPError, json.JSONDecodeError):
        return {}
    return body


def until_received(space: Space, job: str, size: int) -> int:
    """Wait until the sync pod has this many bytes of the archive. Returns the number."""
    deadline = time.monotonic() + SECONDS
    while True:
        body = sync_state(space, job)
        offset = body.get("offset", 0)
        assert isinstance(offset, int)
        if offset >= size and body.get("state") == "receiving":
            return offset
        assert time.monotonic() < deadline, body
        time.sleep(0.02)


# A failed worker ends the others, so node 1 fails only after node 0 has printed everything.
FAILS_LAST = """
import os, pathlib, sys, time
rank = os.environ["NODE_RANK"]
for step in range(3):
    print("step", step, "of node", rank, flush=True)
printed = pathlib.Path(os.environ["TORCHRUN_STATE_DIR"], "node-0-has-printed-all")
if rank == "0":
    printed.touch()
    sys.exit(0)
while not printed.exists():
    time.sleep(0.1)
sys.exit(3)
"""


def steps_of(rank: int, text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"[{rank}] step")]


def test_logs_of_every_rank_and_the_result_are_printed(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py=FAILS_LAST)
    space.apply(queue("once", space.cluster.controller, reliability={"maxRestarts": 0}))
    arguments = ["--queue", "once", "--nodes", "2", "--name", "run", RUN]
    code, out, err = plugin(space, tmp_path, "submit", *arguments)
    assert code == 1
    for rank in (0, 1):
        assert steps_of(rank, out) == [f"[{rank}] step {step} of node {rank}" for step in range(3)]
    assert "exit code 3" in err
    assert "\x1b" not in out + err

    code, merged, _ = plugin(space, tmp_path, "logs", "run")
    assert code == 0
    # The Job controller deletes the other worker if it still runs when this one fails. The copy of
    # its log has not all lines of the launcher.
    assert steps_of(0, merged) == steps_of(0, out)
    assert sorted(line for line in merged.splitlines() if line.startswith("[1]")) == sorted(
        line for line in out.splitlines() if line.startswith("[1]")
    )
    code, one, _ = plugin(space, tmp_path, "logs", "run", "--rank", "1")
    assert one.splitlines() == [line for line in merged.splitlines() if line.startswith("[1]")]
    assert plugin(space, tmp_path, "logs", "run", "--follow")[0] == 1


@pytest.mark.long
def test_ctrl_c_does_not_stop_the_job_and_logs_reattach(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py=STEPS)
    arguments = ["submit", "--queue", "plain", "--name", "run", f"{RUN} 25"]
    with started(space, tmp_path, *arguments) as process:
        assert process.stdout is not None
        while "step 2 " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert f"kubectl torchrun logs run --follow -n {space.name}" in err
    assert space.get(TORCHRUN_JOBS, "run")["status"]["phase"] == "Running"
    code, out, _ = plugin(space, tmp_path, "logs", "run", "--follow")
    assert code == 0
    steps = [line for line in out.splitlines() if "step" in line]
    assert steps == [f"[0] step {step} of node 0" for step in range(25)]


RIGHTS = [
    {"apiGroups": ["torchrun.ai"], "resources": ["torchrunjobs"],
     "verbs": ["get", "list", "watch", "create", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get", "update"]},
]  # fmt: skip


def test_the_documented_permissions_are_enough(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py=STEPS)
    meta = {"name": "alice"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "alice"}
    kind = "rbac.authorization.k8s.io/v1"
    user = {"kind": "User", "name": "alice"}
    space.apply(
        {"apiVersion": kind, "kind": "Role", "metadata": meta, "rules": RIGHTS},
        {"apiVersion": kind, "kind": "RoleBinding", "metadata": meta, "roleRef": role,
         "subjects": [user]},
    )  # fmt: skip
    view = ["config", "view", "--raw", "--minify", "-o", "json"]
    config = json.loads(space.cluster.kubectl(*view).stdout)
    config["users"][0]["user"]["as"] = "alice"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    may = ("auth", "can-i", "update", "pods", "--subresource=proxy", "--as=alice")
    until(lambda: "yes" in space.kubectl(*may, check=False), "the API server knows the binding")
    arguments = ["--kubeconfig", "kubeconfig", "--queue", "plain", "--name", "run", f"{RUN} 1"]
    code, out, err = plugin(space, tmp_path, "submit", *arguments)
    assert code == 0, err
    assert "[0] step 0 of node 0" in out


@pytest.mark.long
def test_an_upload_survives_its_pod_and_the_api_server(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py=CHECK, weights_bin=WEIGHTS)
    with started(space, tmp_path, "submit", "--name", "run", RUN) as process:
        until_received(space, "run", 8 << 20)
        space.kubectl("delete", "pod", "run-sync-0", "--grace-period=0", "--force")
        until_received(space, "run", 16 << 20)
        if space.cluster.local is not None:
            space.cluster.local.restart("kube-apiserver")
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "[0] every byte is here" in out


@pytest.mark.long
def test_sync_resumes_an_interrupted_upload(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py=CHECK, weights_bin=WEIGHTS)
    with started(space, tmp_path, "submit", "--name", "run", RUN) as process:
        until_received(space, "run", 8 << 20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert f"kubectl torchrun sync run -n {space.name}" in err
    assert until_received(space, "run", 8 << 20) >= 8 << 20
    code, _, err = plugin(space, tmp_path, "sync", "run")
    assert code == 0, err
    space.wait_phase("run", "Succeeded")


@pytest.mark.long
def test_sync_after_an_edit_uploads_the_current_files(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py="raise SystemExit('the old code')", weights_bin=WEIGHTS)
    with started(space, tmp_path, "submit", "--name", "run", RUN) as process:
        until_received(space, "run", 8 << 20)
        process.kill()
    before = space.get(TORCHRUN_JOBS, "run")["metadata"]["annotations"][WORKSPACE_SHA256]
    project(tmp_path, train_py=CHECK)
    code, _, err = plugin(space, tmp_path, "sync", "run")
    assert code == 0, err
    assert "Job run expects other content." in err
    space.wait_phase("run", "Succeeded")
    after = space.get(TORCHRUN_JOBS, "run")["metadata"]["annotations"][WORKSPACE_SHA256]
    assert after != before
