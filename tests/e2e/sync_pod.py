"""Complete, partial and damaged uploads to a sync pod through the API server."""

import hashlib
import time
from collections.abc import Iterator

import httpx
import pytest

from bodies import Body
from e2e.space import Space
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS
from torchrun_api.names import SYNC_PORT, WORKSPACE_SHA256

TOKEN = "the token of these tests"
TOKEN_SHA256 = hashlib.sha256(TOKEN.encode()).hexdigest()
PROOF = {"X-Torchrun-Upload-Token": TOKEN}


class SyncPod:
    """A client of one sync pod that can break the upload protocol."""

    def __init__(self, space: Space, name: str) -> None:
        self._api = space.api
        self._job = TORCHRUN_JOBS.path(space.name, name.rpartition("-sync-")[0])
        self._url = f"{PODS.path(space.name, name)}:{SYNC_PORT}/proxy/v1/upload"

    def put(
        self, archive: bytes, start: int = 0, stop: int | None = None, sha256: str = ""
    ) -> httpx.Response:
        """Send a range of the archive, by default all of it."""
        stop = len(archive) if stop is None else stop
        return self._api.put(
            self._url, content=archive[start:stop], headers=headers(archive, start, stop, sha256)
        )

    def cut(self, archive: bytes, start: int, after: int) -> None:
        """Announce the rest of the archive, and break the connection after some bytes."""

        def broken() -> Iterator[bytes]:
            yield archive[start : start + after]
            raise ConnectionAbortedError

        declared = headers(archive, start, len(archive))
        declared["Content-Length"] = str(len(archive) - start)
        with pytest.raises(ConnectionAbortedError):
            self._api.put(self._url, content=broken(), headers=declared)

    def state(self) -> Body:
        """The state of the upload, as the pod reports it."""
        job = self._api.get(self._job).raise_for_status().json()
        wanted = job["metadata"].get("annotations", {}).get(WORKSPACE_SHA256)
        proof = {"X-Torchrun-Workspace": wanted} if wanted else PROOF
        state: Body = self._api.get(self._url, headers=proof).raise_for_status().json()
        return state

    def state_in(self, *states: str, seconds: float = 180) -> Body:
        """Poll until the upload is in one of the states."""
        deadline = time.monotonic() + seconds
        while (state := self.state())["state"] not in states:
            assert time.monotonic() < deadline, state
        return state


def headers(archive: bytes, start: int, stop: int, sha256: str = "") -> dict[str, str]:
    return {
        "Content-Range": f"bytes {start}-{stop - 1}/{len(archive)}",
        "X-Torchrun-Sha256": sha256 or hashlib.sha256(archive).hexdigest(),
        **PROOF,
    }


def is_ready(pod: Body) -> bool:
    """Whether the pod's Ready condition is True."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
