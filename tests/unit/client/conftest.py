"""A TLS server and a kubeconfig for it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scripted_server import ScriptedServer, serving
from torchrun_api.json import JsonObject
from unit.client.tls_server import Write, make_pki, serving_tls, who


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a server and a client, an old and a renewed one, by a CA without the extensions of RFC 5280."""
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
async def server(pki: Path) -> AsyncIterator[ScriptedServer]:
    """An https server that returns the client certificate and the Authorization header."""

    async with serving(who, serving_tls(pki)) as running:
        yield running


@pytest.fixture
def kubeconfig(tmp_path: Path, server: ScriptedServer, pki: Path) -> Write:
    """Writes a kubeconfig for the server; arguments change its user, cluster and context."""

    def write(user: JsonObject, **more: JsonObject) -> str:
        cluster = {"server": server.url, "certificate-authority": str(pki / "ca.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {**cluster, **more.get("cluster", {})}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [
                {
                    "name": "here",
                    "context": {"cluster": "c", "user": "u", **more.get("context", {})},
                },
                {"name": "other", "context": {"cluster": "c", "user": "u", "namespace": "other"}},
            ],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        return str(path)

    return write
