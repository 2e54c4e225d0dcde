"""The server of a job, the keys of its cluster, and the tokens of its workers."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from torchrun_api.contract.contents import Entry, Manifest
from torchrun_runtime.serve.app import serving
from torchrun_runtime.serve.tokens import Keys, Verifier
from torchrun_runtime.serve.tree import ServedTree
from torchrun_runtime.sync.claim import Claim

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
POD = "train-r1-0-x7k2p"


def public_keys() -> jwt.PyJWKSet:
    """The response of the API server."""
    rsa_key = jwt.algorithms.RSAAlgorithm.to_jwk(RSA.public_key(), as_dict=True)
    ec_key = jwt.algorithms.ECAlgorithm.to_jwk(EC.public_key(), as_dict=True)
    keys = [
        {**rsa_key, "kid": "rsa", "alg": "RS256", "use": "sig"},
        {**ec_key, "kid": "ec", "alg": "ES256", "use": "sig"},
    ]
    return jwt.PyJWKSet.from_dict({"keys": keys})


def token(
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | bytes = RSA,
    way: str = "RS256",
    kid: str = "rsa",
    **changes: object,
) -> str:
    """The token of a worker, with changed claims. None removes a claim."""
    claims = {
        "iss": "https://kubernetes.default.svc",
        "aud": ["torchrun.ai/workspace"],
        "exp": time.time() + 10**6,  # they may be made long before they are used
        "nbf": time.time() - 60,
        "kubernetes.io": {"namespace": "ml", "pod": {"name": POD}},
        **changes,
    }
    present = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(present, key, algorithm=way, headers={"kid": kid})


async def fetched() -> jwt.PyJWKSet:
    return public_keys()


def publish(directory: Path, files: dict[str, bytes], *empty: str, mode: str = "") -> Manifest:
    """Make the files the newest revision, as the sync program does.

    mode: of all files; by default 755 for `.sh` files, and 644 for others.
    """
    directory.mkdir(exist_ok=True)
    claim = Claim(directory)
    claim.prepare()
    claim.new.mkdir()
    entries = [Entry(path, "", 0, "dir") for path in empty]
    for path in empty:
        (claim.new / path).mkdir(parents=True)
    for path, content in files.items():
        target = claim.new / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        of_file = mode or ("755" if path.endswith(".sh") else "644")
        entries.append(Entry(path, hashlib.sha256(content).hexdigest(), len(content), of_file))
    manifest = Manifest(entries)
    claim.publish(manifest)
    return manifest


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Run the server of job `train` in namespace `ml` in a thread. Yields its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[AsyncExitStack, str]:
        verifier = Verifier("ml", "train", Keys(fetched))
        stack = AsyncExitStack()
        server = serving(ServedTree(directory), verifier, "127.0.0.1", 0)
        return stack, f"http://127.0.0.1:{await stack.enter_async_context(server)}"

    stack, url = asyncio.run_coroutine_threadsafe(start(), loop).result(120)
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
