"""The secret by which the sync pod of a job authenticates uploads.

An annotation of the job has the SHA-256 of the token; only users who may edit the job can set it.
The token is derived from a key in the user's home, so no state is stored for each job. On another
machine, `sync` sets the token of that machine.
"""

import hashlib
import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from functools import cache

from kubectl_torchrun.cluster.kubectl import ClusterNamespace
from kubectl_torchrun.upload.cache import state_folder

_BYTES = 32


def upload_token(namespace: ClusterNamespace, job: str) -> str:
    """The token of a job, in hexadecimal digits."""
    text = "\0".join([*namespace, job])
    return hmac.digest(_key(), text.encode(), "sha256").hex()


def token_sha256(token: str) -> str:
    """The digest for the annotation of the job."""
    return hashlib.sha256(token.encode()).hexdigest()


@cache
def _key() -> bytes:
    """The key of this user; a key for this process only if the home is not writable."""
    path = state_folder() / "upload-key"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as file:
                file.write(secrets.token_bytes(_BYTES))
                file.flush()
                with suppress(FileExistsError):
                    os.link(file.name, path)  # atomic, and never replaces another key
        key = path.read_bytes()
        if len(key) == _BYTES:
            return key
    return secrets.token_bytes(_BYTES)
