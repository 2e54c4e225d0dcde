"""The validation of tokens: a token must belong to a worker of this job, signed by the cluster.

A worker's token has the audience torchrun.ai/workspace alone. The API server does not accept it,
and the serve pod accepts no token for the API server. The token is bound to its pod and has the
pod's name and namespace. (Users who may create pods in the namespace can choose such a name; they
could also mount the job's claim.)
"""

import jwt

from torchrun_api import names
from torchrun_runtime.serve.keys import Keys

# The algorithms of kube-apiserver: RSA and ECDSA keys, never a shared secret, never "none".
_ALGORITHMS = ["RS256", "RS384", "RS512", "ES256", "ES384", "ES512"]
_LEEWAY_SECONDS = 10  # accepted difference between the clocks of nodes
_LONGEST = 16384


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
