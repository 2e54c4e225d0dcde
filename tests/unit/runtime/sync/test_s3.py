"""A workspace from a bucket behind a gateway or network with faults."""

import io
import ipaddress
import random
import socket
import ssl
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from torchrun_runtime.sync import s3_client
from torchrun_runtime.sync.address import parse_endpoint
from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.settings import Limits, Settings
from torchrun_runtime.sync.signature import Credentials, sign, target
from unit.runtime.git_server import authority
from unit.runtime.s3_server import Gateway, Reply, Request, behave, content, listing, serving
from unit.runtime.syncing import archive, needs_mount, on_small_disk, process

BIG = bytes(range(256)) * 12_000
FILES = {"code/train.py": b"print()", "code/pkg/a b+c.py": b"1", "code/big": BIG, "code/none": b""}


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with serving() as running:
        running.answer = behave(FILES)
        yield running


@pytest.fixture
def settings(tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(s3_client, "PAUSE", 0.001)
    directory = tmp_path / "claim"
    directory.mkdir()
    url = gateway.url("bucket/code")
    return Settings(source="s3", url=url, directory=directory, fetch_timeout=120)


def tree(settings: Settings) -> dict[str, bytes]:
    marker = fetch(settings)
    root = Claim(settings.directory).tree(marker.revision)
    files = (path for path in root.rglob("*") if path.is_file())
    return {f"code/{path.relative_to(root)}": path.read_bytes() for path in files}


def failure(settings: Settings) -> SyncError:
    with pytest.raises(SyncError) as caught:
        fetch(settings)
    assert Claim(settings.directory).marker() is None
    assert {path.name for path in settings.directory.iterdir()} <= {"state"}
    return caught.value


def test_the_signature_is_that_of_the_s3_documentation():
    """Amazon's own example: GET Object? list of a bucket with max-keys and prefix."""
    keys = Credentials(
        "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1"
    )
    where = target("/", {"max-keys": "2", "prefix": "J"})
    now = datetime(2013, 5, 24, tzinfo=UTC)
    headers = sign(keys, "GET", "examplebucket.s3.amazonaws.com", where, now)
    assert headers["authorization"].endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )
    assert "wJalr" not in repr(keys)


def test_a_temporary_key_sends_its_token():
    keys = Credentials("a", "b", "r", "token")
    headers = sign(keys, "GET", "h", "/", datetime(2026, 1, 1, tzinfo=UTC))
    assert headers["x-amz-security-token"] == "token"
    assert "x-amz-security-token" in headers["authorization"]


def test_a_broken_connection_is_resumed(settings: Settings, gateway: Gateway):
    cuts = iter([0, 1, 1000, 70_000, 1 << 20] * 3)

    def answer(request: Request) -> Reply:
        reply = behave(FILES)(request)
        if request.key == "code/big" or not request.key:
            cut = next(cuts, None)
            reply.cut = cut if cut is None or cut < len(reply.body) else None
        return reply

    gateway.answer = answer
    assert tree(settings) == FILES
    ranges = [r.headers.get("range") for r in gateway.requests if r.key == "code/big"]
    assert "bytes=70000-" in ranges
    assert all(r.headers.get("if-match") for r in gateway.requests if r.key)


def test_a_gateway_without_range_requests(settings: Settings, gateway: Gateway):
    cuts = iter([1000, 2_000_000])

    def answer(request: Request) -> Reply:
        request.headers.pop("range", None)
        reply = behave(FILES)(request)
        if request.key == "code/big":
            reply.cut = next(cuts, None)
        return reply

    gateway.answer = answer
    assert tree(settings) == FILES


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_gateway_is_retried(settings: Settings, gateway: Gateway, status: int):
    refusals = iter([status] * 4)

    def answer(request: Request) -> Reply:
        refusal = next(refusals, 0)
        return Reply(status=refusal) if refusal else behave(FILES)(request)

    gateway.answer = answer
    assert tree(settings) == FILES


def test_a_gateway_that_stays_down(settings: Settings, gateway: Gateway):
    gateway.answer = lambda _: Reply(status=503)
    error = failure(settings)
    assert (error.reason, error.permanent) == ("FetchFailed", False)


def test_an_unreachable_gateway(settings: Settings):
    assert failure(replace(settings, url="http://127.0.0.1:1/bucket/c")).reason == "FetchFailed"


def test_an_object_that_is_always_cut_off(settings: Settings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        reply = behave(FILES)(request)
        return replace(reply, cut=0) if request.key == "code/big" else reply

    gateway.answer = answer
    assert failure(settings).reason == "FetchFailed"


@pytest.mark.parametrize("how", ["etag", "412"])
def test_an_object_that_changes_during_the_fetch(settings: Settings, gateway: Gateway, how: str):
    def answer(request: Request) -> Reply:
        if request.key == "code/big" and how == "412":
            return Reply(status=412)
        return (
            content(FILES | {"code/big": BIG + b"!"}, request)
            if request.key
            else Reply(listing(FILES))
        )

    gateway.answer = answer
    error = failure(settings)
    assert (error.reason, error.permanent) == ("SourceChanged", False)


def test_bytes_that_do_not_match_the_etag(settings: Settings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        reply = behave(FILES)(request)
        return replace(reply, body=reply.body[::-1]) if request.key == "code/big" else reply

    gateway.answer = answer
    assert failure(settings).reason == "FetchFailed"


def test_an_etag_that_is_no_md5_is_not_checked(settings: Settings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        if not request.key:
            return Reply(listing(FILES, etag="0" * 32))
        headers = {"ETag": f'"{"0" * 32}"', "x-amz-server-side-encryption": "aws:kms"}
        return replace(content(FILES, request), headers=headers)

    gateway.answer = answer
    assert tree(settings) == FILES


def test_pages(settings: Settings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        if request.key:
            return content(FILES, request)
        at = int(request.query.get("continuation-token", "0"))
        page = dict(list(FILES.items())[at : at + 1])
        return Reply(listing(page, str(at + 1) if at + 1 < len(FILES) else ""))

    gateway.answer = answer
    assert tree(settings) == FILES


def test_pages_without_end(settings: Settings, gateway: Gateway):
    gateway.answer = lambda _: Reply(listing({}, "same"))
    assert failure(settings).reason == "FetchFailed"
    tokens = iter(range(10**9))
    gateway.answer = lambda _: Reply(listing({}, str(next(tokens))))
    assert failure(replace(settings, fetch_timeout=0.5)).reason == "FetchFailed"


@pytest.mark.parametrize("encoding", ["utf-32", "none", "cp932"])
def test_a_list_in_another_encoding(settings: Settings, gateway: Gateway, encoding: str):
    page = f'<?xml version="1.0" encoding="{encoding}"?><ListBucketResult/>'
    gateway.answer = lambda _: Reply(page.encode())
    assert failure(settings).reason == "FetchFailed"


def test_more_objects_than_a_workspace_may_have(settings: Settings):
    assert failure(replace(settings, limits=Limits(entries=2))).reason == "WorkspaceTooLarge"
    assert failure(replace(settings, limits=Limits(bytes=100))).reason == "WorkspaceTooLarge"


def test_a_bucket_in_another_region(settings: Settings, gateway: Gateway):
    gateway.answer = lambda _: Reply(
        b"<Error><Code>PermanentRedirect</Code></Error>",
        301,
        {"x-amz-bucket-region": "eu-west-1", "Location": "http://169.254.169.254/"},
    )
    error = failure(settings)
    assert error.reason == "WrongRegion"
    assert "AWS_REGION" in error.message
    assert "eu-west-1" in error.message


@pytest.mark.parametrize("body", [b"<html>", b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", b"\0"])
def test_a_response_that_is_no_list(settings: Settings, gateway: Gateway, body: bytes):
    gateway.answer = lambda _: Reply(body)
    assert failure(settings).reason in ("FetchFailed", "FetchFailed")


def test_a_secret_of_the_wrong_kind(settings: Settings, tmp_path: Path):
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
    (secret / "AWS_ENDPOINT_URL").write_text("http://metadata@169.254.169.254/latest")
    assert failure(replace(named, url="s3://bucket/c")).reason == "InvalidSource"


@pytest.mark.parametrize("key", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_REGION"])
@pytest.mark.parametrize("value", ["two\nlines", "\u20ac"])
def test_a_secret_that_no_header_can_carry(
    settings: Settings, tmp_path: Path, key: str, value: str
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
        return s3_client.Endpoint(location, (), "b", None, tls, 0.0).host

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
    endpoint = s3_client.Endpoint(location, addresses, "b", None, None, time.monotonic() + 60)
    with closing(s3_client.Bucket(endpoint)) as bucket:
        found = list(bucket.list("code/"))
        assert [b"".join(bucket.pieces(one)) for one in found] == [b"1", b"2"]
    assert {one.headers["host"] for one in gateway.requests} == {f"bucket.invalid:{gateway.port}"}


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
        endpoint = s3_client.Endpoint(location, ("127.0.0.1",), "b", None, context, deadline)
        with closing(s3_client.Bucket(endpoint)) as bucket:
            if name == "bucket.invalid":
                assert [one.key for one in bucket.list("")] == ["a"]
            else:
                with pytest.raises(SyncError) as caught:
                    list(bucket.list(""))
                assert caught.value.reason == "CertificateInvalid"
                assert "bucket.invalid" in caught.value.message


def tarred(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            opened.addfile(member, io.BytesIO(body))
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["code.zip", "code.tar.gz", "CODE.TGZ"])
@pytest.mark.parametrize("sub_path", ["", "code"])
def test_an_archive_or_a_folder_of_it(
    settings: Settings, gateway: Gateway, name: str, sub_path: str
):
    content = archive(FILES) if name.endswith("zip") else tarred(FILES)
    gateway.answer = behave({name: content})
    settings = replace(settings, url=gateway.url(f"bucket/{name}"), sub_path=sub_path)
    prefix = "" if sub_path else "code/"
    found = {path.removeprefix("code/"): body for path, body in tree(settings).items()}
    assert found == {prefix + name.removeprefix("code/"): body for name, body in FILES.items()}


def test_an_archive_without_that_folder(settings: Settings, gateway: Gateway):
    gateway.answer = behave({"code.zip": archive(FILES)})
    wanted = replace(settings, url=gateway.url("bucket/code.zip"), sub_path="none")
    assert failure(wanted).reason == "SourceNotFound"
    assert failure(replace(wanted, limits=Limits(bytes=10))).reason == "WorkspaceTooLarge"


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (403, "AccessDenied", "AccessDenied"),
        (401, "", "AccessDenied"),
        (404, "NoSuchBucket", "SourceNotFound"),
        (404, "NoSuchKey", "SourceNotFound"),
        (404, "", "SourceNotFound"),
        (404, "InvalidAccessKeyId", "AccessDenied"),
        (403, "RequestTimeTooSkewed", "ClockSkew"),
        (418, "Teapot", "FetchFailed"),
    ],
)
def test_refusals_of_a_gateway(
    settings: Settings, gateway: Gateway, status: int, code: str, reason: str
):
    body = f"<Error><Code>{code}</Code><Message>planted\x1b[2J</Message></Error>".encode()
    gateway.answer = lambda _: Reply(body, status)
    error = failure(settings)
    assert (error.reason, error.permanent) == (reason, False)
    assert error.message.isprintable()


def test_the_message_of_a_gateway_is_printed_without_the_secret(
    settings: Settings, gateway: Gateway, tmp_path: Path
):
    (tmp_path / "keys").mkdir()
    keys = {"AWS_ACCESS_KEY_ID": "AKIAPLANTED", "AWS_SECRET_ACCESS_KEY": "planted-secret"}
    for name, value in keys.items():
        (tmp_path / "keys" / name).write_text(value)
    (tmp_path / "keys" / "AWS_REGION").write_text("eu-north-1")
    text = "AKIAPLANTED and planted-secret are not of eu-north-1"
    body = f"<Error><Code>Denied</Code><Message>{text}</Message></Error>".encode()
    gateway.answer = lambda _: Reply(body, 403)
    error = failure(replace(settings, secret="keys", secret_directory=tmp_path / "keys"))
    assert "*** and *** are not of eu-north-1" in error.message


def test_the_pinned_content_or_an_error(settings: Settings, gateway: Gateway):
    first = fetch(replace(settings, digest="1"))
    assert fetch(replace(settings, digest="1", commit=first.commit)) == first
    Claim(settings.directory).directory.joinpath(".sync_success").unlink()
    gateway.answer = behave(FILES | {"code/train.py": b"other"})
    with pytest.raises(SyncError) as caught:
        fetch(replace(settings, digest="1", commit=first.commit))
    assert (caught.value.reason, caught.value.permanent) == ("SourceChanged", True)
    assert Claim(settings.directory).marker() is None


@needs_mount
def test_a_claim_that_is_full(tmp_path: Path, gateway: Gateway):
    gateway.answer = behave({"code/noise": random.Random(1).randbytes(3 << 20)})
    (tmp_path / "claim").mkdir()
    environment = {
        "TORCHRUN_SYNC_SOURCE": "s3",
        "TORCHRUN_SYNC_URL": gateway.url("bucket/code"),
    }
    with process(tmp_path, *on_small_disk(tmp_path, "1m"), **environment) as running:
        code, message = running.end()
    assert (code, message["reason"], message["permanent"]) == (1, "WorkspaceFull", False)
