"""The secret by which a job's sync pod recognises the uploads of the job's submitter.

The job has the token's SHA-256 in an annotation, which only those who may edit the job can set. The
token is derived from a key in the user's home, so nothing is stored for each job, and every
directory on this machine may be sent to it. On another machine `sync` sets that machine's token.
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
    """The digest that the job has in its annotation."""
    return hashlib.sha256(token.encode()).hexdigest()


@cache
def _key() -> bytes:
    """The key of this user; one for this process alone where the home keeps no files."""
    path = state_folder() / "upload-key"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as file:
                file.write(secrets.token_bytes(_BYTES))
                file.flush()
                with suppress(FileExistsError):
                    os.link(file.name, path)  # whole, and never in the place of another
        key = path.read_bytes()
        if len(key) == _BYTES:
            return key
    return secrets.token_bytes(_BYTES)
