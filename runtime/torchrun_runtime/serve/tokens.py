"""The validation of tokens: a token must belong to a worker of this job, signed by the cluster.

A worker's token has the audience torchrun.ai/workspace alone. The API server does not accept it,
and the serve pod accepts no token for the API server. The token is bound to its pod and has the
pod's name and namespace. (Users who may create pods in the namespace can choose such a name; they
could also mount the job's claim.)

The keys come from `/openid/v1/jwks` of the API server, because pods may not reach its `issuer`.
Every service account may read them (ClusterRole system:service-account-issuer-discovery, bound to
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

from torchrun_api import names
from torchrun_runtime.sync.report import log

_TIMEOUT_SECONDS = 10.0
# An unknown key triggers a request, at most this often: any client can send a token with one.
_AGAIN_SECONDS = 10.0

Fetch = Callable[[], Awaitable[jwt.PyJWKSet]]
# The algorithms of kube-apiserver: RSA and ECDSA keys, never a shared secret, never "none".
_ALGORITHMS = ["RS256", "RS384", "RS512", "ES256", "ES384", "ES512"]
_LEEWAY_SECONDS = 10  # accepted difference between the clocks of nodes
_LONGEST = 16384


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


class DeniedError(Exception):
    """The token does not belong to a worker of this job. The message says why."""


class Verifier:
    """Verifies the tokens of one job."""

    def __init__(self, namespace: str, job: str, keys: Keys) -> None:
        self._namespace = namespace
        self._job = job
        self._keys = keys

    async def check(self, token: str) -> str:
        """The name of the worker's pod. Raises DeniedError, KeysUnavailableError."""
        if not token or not token.isascii() or len(token) > _LONGEST:
            raise DeniedError("The request has no valid header 'Authorization: Bearer TOKEN'.")
        try:
            key = await self._keys.get(jwt.get_unverified_header(token).get("kid"))
            if key is None:
                raise DeniedError("The token is signed with a key of another cluster.")
            claims = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=names.WORKSPACE_AUDIENCE,
                leeway=_LEEWAY_SECONDS,
                options={"require": ["exp", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise DeniedError(f"The token is not valid: {error}.") from error
        return self._worker(claims.get("kubernetes.io"))

    def _worker(self, bound: object) -> str:
        body = bound if isinstance(bound, dict) else {}
        pod = body.get("pod")
        name = pod.get("name") if isinstance(pod, dict) else None
        if body.get("namespace") != self._namespace or not isinstance(name, str):
            raise DeniedError("The token does not belong to a pod of this namespace.")
        if not names.is_worker(self._job, name):
            raise DeniedError(f"Pod {name} is not a worker of this job.")
        return name
