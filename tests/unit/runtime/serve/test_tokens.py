"""Only workers of the job are served. They prove it with a token for this audience."""

import asyncio
import base64
import datetime
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import jwt
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from torchrun_api import names
from torchrun_runtime.serve.tokens import (
    ApiServer,
    DeniedError,
    Keys,
    KeysUnavailableError,
    Verifier,
)
from unit.runtime.serving import EC, POD, RSA, fetched, public_keys, token
from web_server import listening


def verifier() -> Verifier:
    return Verifier("ml", "train", Keys(fetched))


def unsigned() -> str:
    return token(key=None, way="none")


def signed_with_the_public_key() -> str:
    """Use the public key as an HMAC secret. Some libraries accept this as a signature."""
    public = RSA.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    header, body, _ = token().split(".")
    header = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "rsa"}).encode())
    signed = f"{header.decode().rstrip('=')}.{body}"
    mac = hmac.new(public, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


def altered() -> str:
    header, _, signature = token().split(".")
    _, other, _ = token(**{"kubernetes.io": {"namespace": "ml", "pod": {"name": POD}}}).split(".")
    body = json.loads(base64.urlsafe_b64decode(other + "==")) | {"exp": time.time() + 2 * 10**6}
    packed = base64.urlsafe_b64encode(json.dumps(body).encode()).decode().rstrip("=")
    return f"{header}.{packed}.{signature}"


def bound(**body: object) -> str:
    return token(**{"kubernetes.io": body})


@pytest.mark.parametrize(
    "good",
    [
        token(),
        token(EC, "ES256", "ec"),
        token(aud="torchrun.ai/workspace"),
        bound(namespace="ml", pod={"name": "train-12-bcdfg"}),
    ],
    ids=["rsa", "ecdsa", "one-audience", "first-attempt"],
)
async def test_a_worker_is_served(good: str) -> None:
    assert (await verifier().check(good)).startswith("train-")


@pytest.mark.parametrize("attempt", [0, 12])
@pytest.mark.parametrize("of_job", [names.child_job, names.workers_job])
async def test_workers_of_every_gang_are_served(
    of_job: Callable[[str, int], str], attempt: int
) -> None:
    pod = f"{of_job('train', attempt)}-7-bcdfg"
    assert await verifier().check(bound(namespace="ml", pod={"name": pod})) == pod


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("", "no valid header"),
        ("a.b", "not valid"),
        ("\udcff", "no valid header"),  # as aiohttp decodes a byte that is not UTF-8
        ("x" * 20_000, "no valid header"),
        (unsigned(), "not valid"),
        (signed_with_the_public_key(), "not valid"),
        (altered(), "not valid"),
        (token(EC, "ES256", "rsa"), "not valid"),
        (token(kid="another"), "of another cluster"),
        (token(aud=["https://kubernetes.default.svc"]), "udience"),
        (token(aud=None), "aud"),
        (token(exp=time.time() - 10**6), "expired"),
        (token(exp=None), "exp"),
        (token(nbf=time.time() + 10**6), "not yet valid"),
        (bound(namespace="other", pod={"name": POD}), "of this namespace"),
        (bound(namespace="ml"), "of this namespace"),
        (bound(namespace="ml", pod="train-0-bcdfg"), "of this namespace"),
        (token(**{"kubernetes.io": None}), "of this namespace"),
        (bound(namespace="ml", pod={"name": "other-0-bcdfg"}), "not a worker of this job"),
        (bound(namespace="ml", pod={"name": "train-sync-0"}), "not a worker of this job"),
        (bound(namespace="ml", pod={"name": "train-0-bcdfg\n"}), "not a worker of this job"),
    ],
)
async def test_other_tokens_are_refused(bad: str, words: str) -> None:
    with pytest.raises(DeniedError, match=words):
        await verifier().check(bad)


class Api:
    """Returns the keys of the API server, and counts the requests."""

    def __init__(self) -> None:
        self.keys = public_keys()
        self.requests = 0
        self.now = 1000.0
        self.down = False

    async def fetch(self) -> jwt.PyJWKSet:
        self.requests += 1
        await asyncio.sleep(0)
        if self.down:
            raise KeysUnavailableError("down")
        return self.keys


async def test_keys_are_fetched_once_and_again_for_an_unknown_key() -> None:
    api = Api()
    keys = Keys(api.fetch, lambda: api.now)
    for _ in range(3):
        assert await keys.get("rsa") is not None
    assert api.requests == 1
    for _ in range(3):
        assert await keys.get("next") is None
    assert api.requests == 1, "anyone can send a token with an unknown key"
    api.now += 11
    assert await keys.get("next") is None
    assert api.requests == 2


async def test_a_failed_fetch_of_keys_is_retried() -> None:
    api = Api()
    keys = Keys(api.fetch, lambda: api.now)
    api.down = True
    with pytest.raises(KeysUnavailableError):
        await keys.get("rsa")
    api.down = False
    assert await keys.get("rsa") is not None
    api.down = True
    assert await keys.get("rsa") is not None, "known keys need no request"


async def test_all_that_wait_share_a_failed_fetch_of_keys() -> None:
    api = Api()
    api.down = True
    keys = Keys(api.fetch, lambda: api.now)
    results = await asyncio.gather(*(keys.get("rsa") for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [KeysUnavailableError] * 5
    assert api.requests == 1


def certificate(directory: Path) -> ssl.SSLContext:
    """Create a self-signed certificate for 127.0.0.1; `ca.crt` is its authority."""
    import ipaddress

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(RSA.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(RSA, hashes.SHA256())
    )
    (directory / "ca.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / "key").write_bytes(
        RSA.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "ca.crt", directory / "key")
    return context


async def test_keys_are_fetched_with_the_pods_own_token(tmp_path: Path) -> None:
    results = []
    body = {
        "keys": [json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA.public_key())) | {"kid": "a"}]
    }

    async def answer(request: web.Request) -> web.Response:
        results.append((request.path, request.headers["Authorization"]))
        text = json.dumps(body) if len(results) == 1 else "<html>"
        return web.Response(text=text, content_type="application/jwk-set+json")

    app = web.Application()
    app.router.add_get("/openid/v1/jwks", answer)
    server = AsyncExitStack()
    port = await server.enter_async_context(listening(web.AppRunner(app), certificate(tmp_path)))
    (tmp_path / "token").write_text("of-the-pod\n")
    async with ApiServer(f"https://127.0.0.1:{port}", tmp_path) as api:
        assert [key.key_id for key in (await api.signing_keys()).keys] == ["a"]
        assert results == [("/openid/v1/jwks", "Bearer of-the-pod")]
        with pytest.raises(KeysUnavailableError):
            await api.signing_keys()
        await server.aclose()
        with pytest.raises(KeysUnavailableError):
            await api.signing_keys()
