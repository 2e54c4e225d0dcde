"""Jobs whose code comes from git, from a bucket and from a claim, with servers that are pods."""

import base64
import json
import textwrap
from pathlib import Path

import pytest

from e2e.manifests import job
from e2e.space import Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds import PODS, TORCHRUN_JOBS
from unit.runtime import git_server, s3_server

PASSWORD = "planted-password"
# The modules that the unit tests run, in a pod of the controller's image, which has git.
SERVE = """
    import threading, pathlib, git_server, s3_server
    root = pathlib.Path("/tmp/repositories")
    made = git_server.repository(root / "train", {"src/code.txt": b"from git"})
    print(made, flush=True)
    with (
        git_server.serving(root, pathlib.Path("/pki"), ("", 8443)) as git,
        s3_server.serving(("", 9000)) as s3,
    ):
        git.login = "me:planted-password"
        s3.answer = s3_server.behave({"train/src/code.txt": b"from s3"})
        threading.Event().wait()
"""
FILL = "cd /claim && mkdir -p new/src && printf 'from a claim' > new/src/code.txt && mv new train"


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
    """A pod of the controller's image; mounts: volumes by name, at /NAME."""
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
    code = {Path(m.__file__).name: Path(m.__file__).read_text() for m in (git_server, s3_server)}
    space.apply(
        opaque("pki", files),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "code"},
            "data": {**code, "serve.py": textwrap.dedent(SERVE)},
        },
        plain_pod(
            space,
            "servers",
            ["python3", "/code/serve.py"],
            {"httpGet": {"path": "/bucket?prefix=", "port": 9000}, "periodSeconds": 1},
            code={"configMap": {"name": "code"}},
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


def test_git_heals_when_its_secret_appears_and_its_ref_is_mended(
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
    status = space.wait_reason("git", "RefNotFound")
    assert url in status["message"]
    mended = {"spec": {"volumes": {"workspace": {"ref": "main"}}}}
    space.kubectl("patch", "tj", "git", "--type=merge", "-p", json.dumps(mended))
    status = space.wait_phase("git", "Succeeded", seconds=90)
    assert status["workspaceCommit"] == commit

    pods = [pod for pod in sync_pods(space, "git") if pod["status"]["phase"] == "Succeeded"]
    log = space.kubectl("logs", pods[-1]["metadata"]["name"])
    assert commit in log
    everything = json.dumps([space.get(TORCHRUN_JOBS, "git"), pods]) + log
    assert PASSWORD not in everything
    workers = space.kubectl("get", "pods", "-l", "app.kubernetes.io/component=worker", "-o", "json")
    assert "login" not in workers, "workers do not see the Secret"


def test_s3(space: Space, servers: tuple[str, bytes, str]):
    url = f"http://{servers[0]}:9000/bucket/train"
    space.apply(fetched("s3", "from s3", source="s3", url=url))
    status = space.wait_phase("s3", "Succeeded", seconds=90)
    assert len(status["workspaceCommit"]) == 64


def test_a_claim_that_is_there(space: Space):
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
    space.apply(fetched("existing", "from a claim", **wanted))
    space.wait_reason("existing", "ClaimNotFound")
    volume: JsonObject = {"persistentVolumeClaim": {"claimName": "code"}}
    space.apply(claim, plain_pod(space, "filler", ["sh", "-c", FILL], claim=volume))
    space.wait("pod/filler", "jsonpath={.status.phase}=Succeeded")
    space.wait_phase("existing", "Succeeded", seconds=120)
    assert sync_pods(space, "existing") == []


def sync_pods(space: Space, name: str) -> list[JsonObject]:
    selector = f"torchrun-job-name={name},app.kubernetes.io/component=sync"
    listed = space.api.get(PODS.path(space.name), params={"labelSelector": selector})
    items: list[JsonObject] = listed.raise_for_status().json()["items"]
    return items
