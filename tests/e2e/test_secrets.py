"""Planted secrets must not appear in any output, object, log or metric."""

import base64
import json
import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from e2e.controller import NAMESPACE, pod_of_deployment
from e2e.manifests import job
from e2e.space import CONTROLLER, Space
from e2e.test_sources import fetched, opaque, servers
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS

__all__ = ["servers"]  # a fixture

pytestmark = pytest.mark.long
PUBLIC = ("username", "ca.crt")
# Any ServiceAccount token: of the controller, of workers, or of the user.
JWT = re.compile(r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}")


def planted(*keys: str) -> dict[str, bytes]:
    """Unique random values."""
    return {key: f"planted-{key}-{secrets.token_hex(12)}".encode() for key in keys}


def private_key() -> bytes:
    """A text in the format of a private key, which ssh rejects."""
    lines = "\n".join(secrets.token_hex(32) for _ in range(4))
    return f"-----BEGIN OPENSSH PRIVATE KEY-----\n{lines}\n-----END OPENSSH PRIVATE KEY-----\n".encode()


@contextmanager
def debugging(space: Space) -> Iterator[None]:
    """Run the controller with log level debug until the end of the block."""
    command = ["kubectl", "port-forward", *CONTROLLER, ":8080"]
    with subprocess.Popen(
        command, env=space.cluster.environment, stdout=subprocess.PIPE, text=True
    ) as forward:
        assert forward.stdout is not None
        port = forward.stdout.readline().split(":")[1].split()[0]
        site = f"http://127.0.0.1:{port}/loglevel"
        try:
            assert httpx.put(site, content="debug").text == "debug\n"
            yield
            httpx.put(site, content="info").raise_for_status()
        finally:
            forward.terminate()


def with_token(space: Space, folder: Path) -> tuple[dict[str, str], str]:
    """The environment of a user with a bearer token in the kubeconfig, and the token."""
    space.kubectl("create", "serviceaccount", "dev")
    role = (f"--serviceaccount={space.name}:dev", "--clusterrole=edit")
    space.kubectl("create", "rolebinding", "dev", *role)
    token = space.kubectl("create", "token", "dev").strip()
    config = json.loads(space.kubectl("config", "view", "--raw", "-o", "json"))
    for user in config["users"]:
        user["user"] = {"token": token}
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return space.cluster.environment | {"KUBECONFIG": str(path)}, token


def plugin(space: Space, environment: dict[str, str], folder: Path, *words: str) -> str:
    """The complete output of a plugin command."""
    return subprocess.run(
        ["kubectl", "torchrun", *words, "-n", space.name],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    ).stdout


def of_space(space: Space) -> dict[str, str]:
    """Logs of every container and all objects, except Secrets and objects of the test."""
    found = {}
    for pod in space.api.get(PODS.path(space.name)).raise_for_status().json()["items"]:
        name = pod["metadata"]["name"]
        if name == "servers":
            continue
        found[f"pod {name}"] = json.dumps(pod)
        found[f"log {name}"] = space.kubectl(
            "logs", name, "--all-containers", "--prefix", check=False
        )
    kinds = ("torchrunjobs", "torchrunqueues", "jobs", "events", "pvc", "services")
    for kind in kinds:
        found[kind] = space.kubectl("get", kind, "-o", "json")
    return found


def of_controller(space: Space) -> dict[str, str]:
    name = pod_of_deployment(space)["metadata"]["name"]
    root = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
    pages = {page: f"{root}:8080/proxy/{page}" for page in ("metrics", "readyz", "healthz")}
    found = {page: space.api.get(path).text for page, path in pages.items()}
    return found | {"controller's log": space.api.get(f"{root}/log").text}


def leaks(everything: dict[str, str], marks: list[bytes]) -> list[str]:
    """The places of each secret, in plain text or base64."""
    forms = {
        form.decode(): mark.decode()[:20]
        for mark in marks
        for form in (mark, base64.b64encode(mark).rstrip(b"="))
    }
    return [
        *(
            f"{mark}... in {at}"
            for at, text in everything.items()
            for form, mark in forms.items()
            if form in text
        ),
        *(f"a token in {at}" for at, text in everything.items() if JWT.search(text)),
    ]


@pytest.mark.timeout(900, func_only=True)
def test_no_secret_is_ever_printed(
    space: Space, servers: tuple[str, bytes, str], tmp_path: Path
) -> None:
    host, authority, _ = servers
    good = {"username": b"me", "password": b"planted-password", "ca.crt": authority}
    wrong = {"username": b"me", **planted("password"), "ca.crt": authority}
    s3 = planted("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    key = {"ssh-privatekey": private_key(), "known_hosts": f"{host} ssh-ed25519 AAAA\n".encode()}
    env = planted("API_KEY")
    space.apply(
        *(opaque("good", good), opaque("wrong", wrong), opaque("s3", s3)),
        *(opaque("key", key), opaque("env", env)),
    )
    environment, token = with_token(space, tmp_path)
    url = f"https://{host}:8443/train"
    variable = {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "env", "key": "API_KEY"}}}
    jobs: list[JsonObject] = [
        fetched("git", "from git", source="git", url=url, secretRef={"name": "good"}),
        fetched("git-wrong", "-", source="git", url=url, secretRef={"name": "wrong"}),
        fetched("s3", "from s3", source="s3", url=f"http://{host}:9000/bucket/train"),
        fetched(
            *("s3-keys", "from s3"),
            source="s3",
            url=f"http://{host}:9000/bucket/train",
            secretRef={"name": "s3"},
        ),
        fetched(
            *("ssh", "-"),
            source="git",
            url=f"ssh://git@{host}:8443/train",
            secretRef={"name": "key"},
        ),
        job("env", "plain", ["sh", "-c", "exit 3"], env=[variable], reliability={"maxRestarts": 0}),
    ]
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print('trained')\n")
    (code / ".env").write_text(f"TOKEN={env['API_KEY'].decode()}\n")
    outputs: dict[str, str] = {}
    with debugging(space):
        space.apply(*jobs)
        words = ("submit", "--queue", "plain", "--name", "zip", "--follow", "cat train.py")
        outputs["submit"] = plugin(space, environment, code, *words)
        assert "trained" in outputs["submit"]
        direct = ("submit", "--queue", "plain", "--name", "direct", "cat train.py")
        outputs["submit direct"] = plugin(space, environment, code, *direct)
        for name in ("git", "s3", "zip"):
            space.wait_phase(name, "Succeeded")
        space.wait_phase("env", "Failed")
        space.wait_reason("git-wrong", "AccessDenied")
        for command in (("list",), ("doctor",), ("queues",)):
            outputs[" ".join(command)] = plugin(space, environment, code, *command)
        for name in ("git", "git-wrong", "s3-keys", "ssh", "env", "zip"):
            for verb in ("status", "why", "logs"):
                outputs[f"{verb} {name}"] = plugin(space, environment, code, verb, name)
        everything = outputs | of_space(space) | of_controller(space)
    reasons = {j["metadata"]["name"]: space.get(TORCHRUN_JOBS, j["metadata"]["name"]) for j in jobs}
    print({name: body["status"].get("reason") for name, body in reasons.items()})
    marks = [
        *(
            value
            for of in (good, wrong, s3, env)
            for name, value in of.items()
            if name not in PUBLIC
        ),
        *(line for line in key["ssh-privatekey"].splitlines() if not line.startswith(b"---")),
        token.encode(),
        token.rpartition(".")[2].encode(),
    ]
    assert len([place for place in everything if place.startswith("log ")]) >= len(jobs)
    assert leaks(everything, marks) == []
