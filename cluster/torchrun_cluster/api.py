"""The few HTTP calls that bringing a cluster up needs; no client library, so no venv."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable

from .errors import ClusterError
from .state import State

CALL_TIMEOUT = 5.0
READY_TIMEOUT = 120.0
POLL_EVERY = 0.05


class ApiServer:
    """The cluster's API server as its administrator sees it, through the host's local port."""

    def __init__(self, state: State) -> None:
        self._state = state

    def request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """One call; status 0 when the server cannot be reached."""
        pki = self._state.certificates
        try:
            tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
            tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")
            connection = http.client.HTTPSConnection(
                "127.0.0.1", self._state.ports.api, timeout=CALL_TIMEOUT, context=tls
            )
            try:
                content = None if body is None else json.dumps(body)
                connection.request(method, path, content, {"Content-Type": "application/json"})
                response = connection.getresponse()
                return response.status, response.read()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error).encode()

    def exists(self, path: str) -> bool:
        """Whether a GET of the path answers 200."""
        return self.request("GET", path)[0] == http.client.OK

    def nodes_are_ready(self, count: int) -> bool:
        """Whether there are this many nodes and all of them are Ready."""
        status, body = self.request("GET", "/api/v1/nodes")
        if status != http.client.OK:
            return False
        nodes = json.loads(body)["items"]
        return len(nodes) == count and all(
            any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in node["status"].get("conditions", ())
            )
            for node in nodes
        )

    def create(self, path: str, body: object) -> None:
        """POST an object; one that exists already is left as it is."""
        deadline = time.monotonic() + READY_TIMEOUT
        status, answer = self.request("POST", path, body)
        while _is_busy(status) and time.monotonic() < deadline:
            time.sleep(POLL_EVERY)
            status, answer = self.request("POST", path, body)
        if status not in (http.client.CREATED, http.client.CONFLICT):
            raise ClusterError(f"POST {path} answered {status}: {answer.decode(errors='replace')}")


def _is_busy(status: int) -> bool:
    """Whether an API server that answers so, or not at all (0), may answer otherwise later."""
    busy = (http.client.TOO_MANY_REQUESTS, http.client.INTERNAL_SERVER_ERROR)
    return status in (0, *busy, http.client.SERVICE_UNAVAILABLE, http.client.GATEWAY_TIMEOUT)


def wait_until(
    ready: Callable[[], bool],
    what: str,
    check_alive: Callable[[], None] = lambda: None,
    timeout: float = READY_TIMEOUT,
) -> None:
    """Poll until `ready`; `check_alive` raises when waiting has become pointless."""
    deadline = time.monotonic() + timeout
    polls = 0
    while not ready():
        polls += 1
        if time.monotonic() > deadline:
            check_alive()
            raise ClusterError(f"{what} did not happen within {timeout:.0f} s")
        if polls % 10 == 0:
            check_alive()
        time.sleep(POLL_EVERY)


def compact_etcd(connection: socket.socket) -> int:
    """Compact etcd's history up to now over an open connection; returns the revision.

    Watches and lists at older resource versions then fail with 410, as after etcd's own
    compaction. Uses etcd's JSON gateway (https://etcd.io/docs/v3.6/dev-guide/api_grpc_gateway/).
    """
    client = http.client.HTTPConnection("127.0.0.1", timeout=READY_TIMEOUT)
    client.sock = connection
    try:
        revision = int(_etcd_call(client, "range", {"key": "AA=="})["header"]["revision"])
        _etcd_call(client, "compaction", {"revision": str(revision), "physical": True})
    finally:
        client.close()
    return revision


def _etcd_call(
    client: http.client.HTTPConnection, method: str, body: dict[str, object]
) -> dict[str, dict[str, str]]:
    client.request("POST", f"/v3/kv/{method}", json.dumps(body))
    response = client.getresponse()
    content = response.read()
    if response.status != http.client.OK:
        raise ClusterError(f"etcd {method} failed: {content.decode(errors='replace')}")
    answer: dict[str, dict[str, str]] = json.loads(content)
    return answer
