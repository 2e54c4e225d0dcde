"""Jobs with code from git, from a bucket and from a PVC. The servers are pods."""

import base64
import json
import textwrap
import time
from pathlib import Path

import pytest

from e2e.manifests import job
from e2e.space import Space, until
from e2e.test_reload import STEP, ended, log, plugin, said_at, workers
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS
from torchrun_api.names import UP_TO_DATE
from torchrun_cluster import node
from unit.runtime import git_server, http_server, s3_server, ssh_server

PASSWORD = "planted-password"
# The server modules of the unit tests, in a pod of the controller's image, which has git.
SERVE = """
    import threading, pathlib
    from unit.runtime import git_server, s3_server
    root = pathlib.Path("/tmp/repositories")
    made = git_server.repository(root / "train", {"src/code.txt": b"from git"})
    bucket = pathlib.Path("/tmp/bucket")
    (bucket / "train/src").mkdir(parents=True)
    (bucket / "train/src/code.txt").write_bytes(b"from s3")
    def objects():
        files = (path for path in bucket.rglob("*") if path.is_file())
        return {path.relative_to(bucket).as_posix(): path.read_bytes() for path in files}
    print(made, flush=True)
    with (
        git_server.serving(root, pathlib.Path("/pki"), ("", 8443)) as git,
        s3_server.serving(("", 9000)) as s3,
    ):
        git.login = "me:planted-password"
        s3.answer = lambda request: s3_server.behave(objects())(request)
        threading.Event().wait()
"""
# The pod of the job may start first, and its kubelet creates the folder train.
FILL = (
    "mkdir -p /claim/train/src && cd /claim/train/src"
    " && printf 'from a claim' > new && mv new code.txt"
)
WAIT = "until [ -e src/code.txt ]; do sleep 0.2; done"


def reads(text: str) -> list[str]:
    return ["python3", "-c", f"import sys; sys.exit(open('src/code.txt').read() != {text!r})"]


def fetched(name: str, text: str, **workspace: object) -> JsonObject:
    return job(name, "plain", reads(text), volumes={"workspace": workspace})


def opaque(name: str, files: dict[str, bytes]) -> JsonObject:
    data = {key: base64.b64encode(value).decode() for key, value in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


def plain_pod(
    space: Space,
    name: str,
    command: list[str],
    probe: JsonObject | None = None,
    **mounts: JsonObject,
) -> JsonObject:
    """A pod with the controller's image. mounts: volumes by name, at /NAME."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"fsGroup": 65532},
            "containers": [
                {
                    "name": "main",
                    "image": space.cluster.controller,
                    "imagePullPolicy": "IfNotPresent",
                    "command": command,
                    "volumeMounts": [{"name": n, "mountPath": f"/{n}"} for n in mounts],
                    **({"readinessProbe": probe} if probe else {}),
                }
            ],
            "volumes": [{"name": n, **volume} for n, volume in mounts.items()],
        },
    }


@pytest.fixture
def servers(space: Space, tmp_path: Path) -> tuple[str, bytes, str]:
    """Host name, certificate authority and the commit of the repository."""
    host = f"servers.{space.name}.svc"
    authority = git_server.authority(tmp_path / "pki", f"DNS:{host}")
    files = {name: (tmp_path / "pki" / name).read_bytes() for name in ("crt", "key")}
    modules = [Path(m.__file__) for m in (git_server, s3_server, http_server)]
    code = {path.name: path.read_text() for path in modules} | {"serve.py": textwrap.dedent(SERVE)}
    placed = {path.name: f"unit/runtime/{path.name}" for path in modules} | {"serve.py": "serve.py"}
    items = [{"key": name, "path": path} for name, path in placed.items()]
    space.apply(
        opaque("pki", files),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "code"},
            "data": code,
        },
        plain_pod(
            space,
            "servers",
            ["python3", "/code/serve.py"],
            {"httpGet": {"path": "/bucket?prefix=", "port": 9000}, "periodSeconds": 1},
            code={"configMap": {"name": "code", "items": items}},
            pki={"secret": {"secretName": "pki"}},
        ),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "servers"},
            "spec": {
                "selector": {"app": "servers"},
                "ports": [{"name": "git", "port": 8443}, {"name": "s3", "port": 9000}],
            },
        },
    )
    space.wait("pod/servers", "condition=Ready")
    return host, authority.read_bytes(), space.kubectl("logs", "servers").split()[-1]


@pytest.mark.long
def test_git_succeeds_after_its_secret_is_created_and_its_ref_is_fixed(
    space: Space, servers: tuple[str, bytes, str]
):
    host, authority, commit = servers
    url = f"https://{host}:8443/train"
    secret = {"secretRef": {"name": "login"}}
    space.apply(fetched("git", "from git", source="git", url=url, ref="none", **secret))
    status = space.wait_reason("git", "SecretNotFound")
    assert status["phase"] == "Syncing"
    assert "Secret login" in status["message"]

    keys = {"username": b"me", "password": PASSWORD.encode(), "ca.crt": authority}
    space.apply(opaque("login", keys))
    status = space.wait_reason("git", "SourceNotFound")
    assert url in status["message"]
    fixed = {"spec": {"volumes": {"workspace": {"ref": "main"}}}}
    space.kubectl("patch", "tj", "git", "--type=merge", "-p", json.dumps(fixed))
    status = space.wait_phase("git", "Succeeded")
    assert status["workspaceCommit"] == commit

    pods = [pod for pod in sync_pods(space, "git") if pod["status"]["phase"] == "Succeeded"]
    log = space.kubectl("logs", pods[-1]["metadata"]["name"])
    assert commit in log
    everything = json.dumps([space.get(TORCHRUN_JOBS, "git"), pods]) + log
    assert PASSWORD not in everything
    workers = space.kubectl("get", "pods", "-l", "app.kubernetes.io/component=worker", "-o", "json")
    assert "login" not in workers, "workers have no access to the Secret"


def committed(space: Space, number: int) -> str:
    """Commit a program that prints its number and the time."""
    program = STEP.format(number=number)
    script = (
        "import sys, pathlib; sys.path.insert(0, '/code'); from unit.runtime import git_server;"
        "at = pathlib.Path('/tmp/repositories/train');"
        "print(git_server.commit(at, {'train.py': sys.argv[1].encode()}))"
    )
    return space.kubectl("exec", "servers", "--", "python3", "-c", script, program).split()[-1]


def rename_branch(space: Space, old: str, new: str) -> None:
    branch = ("git", "-C", "/tmp/repositories/train", "branch", "-m", old, new)
    space.kubectl("exec", "servers", "--", *branch)


def up_to_date(space: Space) -> JsonObject:
    """The condition of the job `git`; empty without one."""
    conditions = space.get(TORCHRUN_JOBS, "git")["status"]["conditions"]
    return next((c for c in conditions if c["type"] == UP_TO_DATE), {})


def everywhere(space: Space, pods: dict[str, str], number: int) -> bool:
    return all(f"new code: {number} " in log(space, pod) for pod in pods)


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
# With shared delivery a fixed branch waits up to a minute for the next retry.
@pytest.mark.parametrize("delivery", ["shared", "direct"])
def test_a_running_job_gets_pushed_commits(
    space: Space, servers: tuple[str, bytes, str], tmp_path: Path, delivery: str
):
    host, authority, _ = servers
    keys = {"username": b"me", "password": PASSWORD.encode(), "ca.crt": authority}
    space.apply(opaque("login", keys))
    committed(space, 1)
    source = {"source": "git", "url": f"https://{host}:8443/train", "ref": "main"}
    workspace = {"workspace": {**source, "secretRef": {"name": "login"}, "delivery": delivery}}
    space.apply(job("git", "plain", "exec python3 train.py", 2, volumes=workspace))
    space.wait_phase("git", "Running")
    pods = workers(space)
    until(lambda: everywhere(space, pods, 1), "the first code")

    newer = committed(space, 2)
    started = time.time()
    output = ended(plugin(space, tmp_path, "sync", "git"))
    assert f"runs revision 2 (commit {newer})" in output
    until(lambda: everywhere(space, pods, 2), "the second code")
    first = min(said_at(space, pod, "new code: 2") for pod in pods) - started
    last = max(said_at(space, pod, "new code: 2") for pod in pods) - started
    print(f"git, {delivery}: sync to first line {first:.2f} s, on both nodes {last:.2f} s")
    status = space.get(TORCHRUN_JOBS, "git")["status"]
    assert (status["workspaceCommit"], status["workspaceRevision"]) == (newer, 2)
    assert "Job git already runs revision 2" in ended(plugin(space, tmp_path, "sync", "git"))

    rename_branch(space, "main", "gone")
    refused = plugin(space, tmp_path, "sync", "git")
    out, _ = refused.communicate(timeout=300)
    assert refused.returncode != 0
    assert "SourceNotFound" in out
    assert "main" in up_to_date(space)["message"]
    # A recreated main is new content, and may be fetched as soon as it appears.
    committed(space, 3)
    rename_branch(space, "gone", "main")
    until(lambda: everywhere(space, pods, 3), "the third code, by itself", 150)
    until(lambda: not up_to_date(space), "the condition")
    assert workers(space) == pods
    status = space.get(TORCHRUN_JOBS, "git")["status"]
    assert status["phase"] == "Running"
    assert (status.get("attempt", 0), status.get("restarts", 0)) == (0, 0)
    assert all(log(space, pod).count("new code:") == 3 for pod in pods), (
        "unchanged content restarts nothing"
    )


@pytest.mark.long
def test_git_over_ssh_in_a_sync_pod(space: Space, tmp_path: Path):
    if space.cluster.local is None:
        pytest.skip("only the local cluster has a network that a process of this machine can enter")
    first, *_ = space.cluster.local.nodes
    inside = ["nsenter", "--target", str(node.anchor_pid(first)), "--net"]
    with ssh_server.serving(tmp_path, first.address, 2222, inside) as sshd:
        git_server.commit(tmp_path / "train", {"src/code.txt": b"by ssh"})
        ssh_server.make_key(tmp_path / "wrong")
        login = {
            "ssh-privatekey": (tmp_path / "wrong").read_bytes(),
            "known_hosts": sshd.known_hosts("other").encode(),
        }
        space.apply(opaque("deploy", login))
        secret = {"secretRef": {"name": "deploy"}}
        space.apply(fetched("ssh", "by ssh", source="git", url=sshd.url, **secret))
        status = space.wait_reason("ssh", "HostKeyMismatch")
        assert first.address in status["message"]
        login["known_hosts"] = sshd.known_hosts().encode()
        space.apply(opaque("deploy", login))
        status = space.wait_reason("ssh", "AccessDenied")
        assert "Check the Secret in volumes.workspace.secretRef" in status["message"]
        login["ssh-privatekey"] = (tmp_path / "user").read_bytes()
        space.apply(opaque("deploy", login))
        status = space.wait_phase("ssh", "Succeeded")
    assert len(status["workspaceCommit"]) == 40


def test_s3(space: Space, servers: tuple[str, bytes, str]):
    url = f"http://{servers[0]}:9000/bucket/train"
    space.apply(fetched("s3", "from s3", source="s3", url=url))
    status = space.wait_phase("s3", "Succeeded")
    assert len(status["workspaceCommit"]) == 64


def uploaded(space: Space, number: int) -> None:
    """Upload a program that prints its number and the time."""
    program = STEP.format(number=number)
    script = (
        "import sys, pathlib; pathlib.Path('/tmp/bucket/train/train.py').write_text(sys.argv[1])"
    )
    space.kubectl("exec", "servers", "--", "python3", "-c", script, program)


@pytest.mark.long
def test_a_running_job_gets_changes_of_the_bucket(
    space: Space, servers: tuple[str, bytes, str], tmp_path: Path
):
    uploaded(space, 1)
    source = {"source": "s3", "url": f"http://{servers[0]}:9000/bucket/train"}
    space.apply(
        job("s3", "plain", "exec python3 train.py", 2, volumes={"workspace": source}),
    )
    before = space.wait_phase("s3", "Running")
    pods = workers(space)
    until(lambda: everywhere(space, pods, 1), "the first code")
    uploaded(space, 2)
    started = time.time()
    assert "runs revision 2" in ended(plugin(space, tmp_path, "sync", "s3"))
    until(lambda: everywhere(space, pods, 2), "the second code")
    last = max(said_at(space, pod, "new code: 2") for pod in pods) - started
    print(f"s3: sync to first line on both nodes {last:.2f} s")
    status = space.get(TORCHRUN_JOBS, "s3")["status"]
    assert status["workspaceRevision"] == 2
    assert status["workspaceCommit"] != before["workspaceCommit"]
    assert workers(space) == pods


def test_an_existing_claim(space: Space):
    claim: JsonObject = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "code"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "16Mi"}},
        },
    }
    wanted = {"source": "existing", "claimName": "code", "subPath": "train"}
    command = ["sh", "-c", f'{WAIT}; exec "$@"', "sh", *reads("from a claim")]
    space.apply(job("existing", "plain", command, volumes={"workspace": wanted}))
    space.wait_reason("existing", "ClaimNotFound")
    volume: JsonObject = {"persistentVolumeClaim": {"claimName": "code"}}
    space.apply(claim, plain_pod(space, "filler", ["sh", "-c", FILL], claim=volume))
    space.wait("pod/filler", "jsonpath={.status.phase}=Succeeded")
    space.wait_phase("existing", "Succeeded")
    assert sync_pods(space, "existing") == []


def sync_pods(space: Space, name: str) -> list[JsonObject]:
    selector = f"torchrun-job-name={name},app.kubernetes.io/component=sync"
    listed = space.api.get(PODS.path(space.name), params={"labelSelector": selector})
    items: list[JsonObject] = listed.raise_for_status().json()["items"]
    return items
