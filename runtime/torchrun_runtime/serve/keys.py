"""The public keys of the cluster's service-account tokens, from the API server.

They come from `/openid/v1/jwks` of the API server, because pods may not reach its `issuer`. Every
service account may read them (ClusterRole system:service-account-issuer-discovery, bound to
system:serviceaccounts since Kubernetes 1.20), so the pod needs no role and no TokenReview. A gang
of any size needs one request.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import jwt
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from torchrun_runtime.sync.report import log

_TIMEOUT_SECONDS = 10.0
# An unknown key triggers a request, at most this often: any client can send a token with one.
_AGAIN_SECONDS = 10.0

Fetch = Callable[[], Awaitable[jwt.PyJWKSet]]


class KeysUnavailableError(Exception):
    """The API server did not return its keys. A retry may succeed."""


class Keys:
    """Keys by id. A rotated key is fetched when its first token arrives."""

    def __init__(self, fetch: Fetch, clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch = fetch
        self._clock = clock
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")
        self._request: asyncio.Task[None] | None = None

    async def get(self, key_id: str | None) -> jwt.PyJWK | None:
        """The key; None if the cluster does not have it. Raises KeysUnavailableError."""
        if key_id in self._keys:
            return self._keys[key_id]
        # All that wait share one request and its failure: the time limits do not add up.
        if self._request is None and self._clock() - self._fetched_at >= _AGAIN_SECONDS:
            self._request = asyncio.create_task(self._renew())
        if self._request is not None:
            await asyncio.shield(self._request)
        return self._keys.get(key_id)

    async def _renew(self) -> None:
        try:
            key_set = await self._fetch()
            # Set after the request, so that a failed request is repeated at once.
            self._fetched_at = self._clock()
            self._keys = {key.key_id: key for key in key_set.keys}
        finally:
            self._request = None


class ApiServer:
    """A client of the API server with the token of the pod, which the kubelet renews."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url = f"{url}/openid/v1/jwks"
        self._directory = directory
        self._session: ClientSession | None = None

    async def __aenter__(self) -> Self:
        context = ssl.create_default_context(cafile=self._directory / "ca.crt")
        # The certificates of many clusters lack fields that Python 3.13 requires beyond RFC 5280.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        timeout = ClientTimeout(total=_TIMEOUT_SECONDS)
        self._session = ClientSession(connector=TCPConnector(ssl=context), timeout=timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def signing_keys(self) -> jwt.PyJWKSet:
        """Request the keys. Raises KeysUnavailableError."""
        assert self._session is not None
        try:
            token = (self._directory / "token").read_text().strip()
            headers = {"Authorization": f"Bearer {token}"}
            async with self._session.get(
                self._url, headers=headers, allow_redirects=False
            ) as answer:
                answer.raise_for_status()
                return jwt.PyJWKSet.from_dict(await answer.json(content_type=None))
        except (ClientError, TimeoutError, OSError, ValueError, jwt.PyJWTError) as error:
            log("no signing keys", "warning", cause=str(error) or repr(error))
            raise KeysUnavailableError(f"{self._url}: {error}") from error
