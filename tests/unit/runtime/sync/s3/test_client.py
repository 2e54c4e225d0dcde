"""How a bucket is reached: addresses, certificates, keys and their signature."""

import ipaddress
import socket
import ssl
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from torchrun_runtime.sync.address import parse_endpoint
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.s3 import client as s3_client
from torchrun_runtime.sync.s3.signature import KeyPair, sign, target
from torchrun_runtime.sync.s3.source import open_bucket
from torchrun_runtime.sync.secret import Secret
from torchrun_runtime.sync.settings import SyncSettings
from unit.runtime.git_server import authority
from unit.runtime.s3_server import Gateway, Reply, behave, serving
from unit.runtime.sync.bucket import failure


def test_the_signature_is_that_of_the_s3_documentation():
    """Amazon's own example: GET Object? list of a bucket with max-keys and prefix."""
    keys = KeyPair("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1")
    where = target("/", {"max-keys": "2", "prefix": "J"})
    now = datetime(2013, 5, 24, tzinfo=UTC)
    headers = sign(keys, "GET", "examplebucket.s3.amazonaws.com", where, now)
    assert headers["authorization"].endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )
    assert "wJalr" not in repr(keys)


def test_a_temporary_key_sends_its_token():
    keys = KeyPair("a", "b", "r", "token")
    headers = sign(keys, "GET", "h", "/", datetime(2026, 1, 1, tzinfo=UTC))
    assert headers["x-amz-security-token"] == "token"
    assert "x-amz-security-token" in headers["authorization"]


def test_a_bucket_in_another_region(settings: SyncSettings, gateway: Gateway):
    gateway.answer = lambda _: Reply(
        b"<Error><Code>PermanentRedirect</Code></Error>",
        301,
        {"x-amz-bucket-region": "eu-west-1", "Location": "http://169.254.169.254/"},
    )
    error = failure(settings)
    assert error.reason == "WrongRegion"
    assert "AWS_REGION" in error.message
    assert "eu-west-1" in error.message


def test_a_secret_of_the_wrong_kind(settings: SyncSettings, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.mkdir()
    named = replace(settings, secret="s", secret_directory=secret)
    assert failure(named).reason == "SecretNotFound"
    (secret / "AWS_ACCESS_KEY_ID").write_text("k")
    assert failure(named).reason == "SecretInvalid"
    (secret / "AWS_SECRET_ACCESS_KEY").write_bytes(b"\xff\xfe")
    assert failure(named).reason == "SecretInvalid"
    (secret / "AWS_ACCESS_KEY_ID").unlink()
    (secret / "AWS_SECRET_ACCESS_KEY").unlink()
    (secret / "ca.crt").write_text("nothing")
    https = replace(named, url="https://127.0.0.1:1/bucket/c")
    assert failure(https).reason == "SecretInvalid"


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("http://metadata@169.254.169.254/latest", "SecretInvalid"),
        ("minio:9000", "SecretInvalid"),
        ("https://minio:99999", "SecretInvalid"),
        ("http://169.254.169.254", "ForbiddenAddress"),
        ("http://minio.invalid", "FetchFailed"),
    ],
)
def test_an_endpoint_that_the_secret_may_correct(
    settings: SyncSettings, tmp_path: Path, endpoint: str, reason: str
):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "AWS_ENDPOINT_URL").write_text(endpoint)
    named = replace(settings, secret="keys", secret_directory=tmp_path / "keys")
    error = failure(replace(named, url="s3://bucket/c"))
    assert (error.reason, error.permanent) == (reason, False)
    assert "AWS_ENDPOINT_URL" in error.message
    assert "volumes.workspace.url" not in error.message


@pytest.mark.parametrize(
    ("region", "host"),
    [
        ("eu-west-1", "s3.eu-west-1.amazonaws.com"),
        ("cn-north-1", "s3.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_the_endpoint_of_a_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, region: str, host: str
):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("192.0.2.1", 0))])
    (tmp_path / "AWS_REGION").write_text(region)
    bucket, key = open_bucket("s3://Team_Data/Code", Secret("keys", tmp_path), float("inf"))
    with closing(bucket):
        assert bucket.endpoint.display_name == f"https://{host}/Team_Data"
    assert key == "Code"


@pytest.mark.parametrize("key", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_REGION"])
@pytest.mark.parametrize("value", ["two\nlines", "\u20ac"])
def test_a_secret_that_no_header_can_carry(
    settings: SyncSettings, tmp_path: Path, key: str, value: str
):
    directory = tmp_path / "keys"
    directory.mkdir()
    values = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", key: value}
    for name, text in values.items():
        (directory / name).write_text(text)
    error = failure(replace(settings, secret="keys", secret_directory=directory))
    assert (error.reason, error.permanent) == ("SecretInvalid", False)
    assert key in error.message


def test_the_host_header_names_the_port_where_it_is_not_the_usual_one():
    def host(url: str, tls: ssl.SSLContext | None = None) -> str:
        location = parse_endpoint(url)
        return s3_client.BucketEndpoint(location, (), "b", None, tls, 0.0).host

    assert host("http://minio:9000") == "minio:9000"
    assert host("http://minio") == "minio"
    assert host("https://[2001:db8:0:0:0:0:0:1]:443", ssl.create_default_context()) == (
        "[2001:db8:0:0:0:0:0:1]"
    )


def test_connects_to_the_checked_addresses_only(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """The first address refuses connections. The name is used for the Host header only."""
    real = socket.getaddrinfo

    def literal(host: str, *rest: Any, **more: Any) -> Any:
        ipaddress.ip_address(host)
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", literal)
    gateway.answer = behave({"code/a": b"1", "code/b": b"2"})
    location = parse_endpoint(f"http://bucket.invalid:{gateway.port}")
    addresses = ("127.0.0.2", "127.0.0.1")
    endpoint = s3_client.BucketEndpoint(location, addresses, "b", None, None, time.monotonic() + 60)
    with closing(s3_client.Bucket(endpoint)) as bucket:
        found = list(bucket.list("code/"))
        assert [b"".join(bucket.pieces(one)) for one in found] == [b"1", b"2"]
    assert {one.headers["host"] for one in gateway.requests} == {f"bucket.invalid:{gateway.port}"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["bucket.invalid", "other.invalid"])
def test_the_certificate_must_match_the_host_name(tmp_path: Path, name: str):
    pki = tmp_path / "pki"
    context = ssl.create_default_context(cafile=authority(pki, f"DNS:{name},IP:127.0.0.1"))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pki / "crt", pki / "key")
    with serving(tls=server) as gateway:
        gateway.answer = behave({"a": b"1"})
        location = parse_endpoint(f"https://bucket.invalid:{gateway.port}")
        deadline = time.monotonic() + 60
        endpoint = s3_client.BucketEndpoint(location, ("127.0.0.1",), "b", None, context, deadline)
        with closing(s3_client.Bucket(endpoint)) as bucket:
            if name == "bucket.invalid":
                assert [one.key for one in bucket.list("")] == ["a"]
            else:
                with pytest.raises(SyncError) as caught:
                    list(bucket.list(""))
                assert caught.value.reason == "CertificateInvalid"
                assert "bucket.invalid" in caught.value.message
