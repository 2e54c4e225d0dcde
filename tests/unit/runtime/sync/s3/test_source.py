"""A workspace from a bucket behind a gateway or network with faults."""

import io
import random
import tarfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.settings import ArchiveLimits, SyncSettings
from unit.runtime.s3_server import (
    Encode,
    Gateway,
    Reply,
    Request,
    behave,
    content,
    form_encoded,
    listing,
)
from unit.runtime.sync.bucket import BIG, FILES, failure, tree
from unit.runtime.syncing import archive, needs_mount, on_small_disk, process


def test_a_broken_connection_is_resumed(settings: SyncSettings, gateway: Gateway):
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


def test_a_gateway_without_range_requests(settings: SyncSettings, gateway: Gateway):
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
def test_a_busy_gateway_is_retried(settings: SyncSettings, gateway: Gateway, status: int):
    refusals = iter([status] * 4)

    def answer(request: Request) -> Reply:
        refusal = next(refusals, 0)
        return Reply(status=refusal) if refusal else behave(FILES)(request)

    gateway.answer = answer
    assert tree(settings) == FILES


def test_a_gateway_that_stays_down(settings: SyncSettings, gateway: Gateway):
    gateway.answer = lambda _: Reply(status=503)
    error = failure(settings)
    assert (error.reason, error.permanent) == ("FetchFailed", False)


def test_an_unreachable_gateway(settings: SyncSettings):
    assert failure(replace(settings, url="http://127.0.0.1:1/bucket/c")).reason == "FetchFailed"


def test_an_object_that_is_always_cut_off(settings: SyncSettings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        reply = behave(FILES)(request)
        return replace(reply, cut=0) if request.key == "code/big" else reply

    gateway.answer = answer
    assert failure(settings).reason == "FetchFailed"


@pytest.mark.parametrize("key", ["code/none", "code/train.py"])
def test_an_object_that_never_arrives(settings: SyncSettings, gateway: Gateway, key: str):
    gateway.answer = lambda request: (
        Reply(status=503) if request.key == key else behave(FILES)(request)
    )
    error = failure(settings)
    assert (error.reason, error.permanent) == ("FetchFailed", False)


@pytest.mark.parametrize("how", ["etag", "412"])
def test_an_object_that_changes_during_the_fetch(
    settings: SyncSettings, gateway: Gateway, how: str
):
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


def test_bytes_that_do_not_match_the_etag(settings: SyncSettings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        reply = behave(FILES)(request)
        return replace(reply, body=reply.body[::-1]) if request.key == "code/big" else reply

    gateway.answer = answer
    assert failure(settings).reason == "FetchFailed"


def test_an_etag_that_is_no_md5_is_not_checked(settings: SyncSettings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        if not request.key:
            return Reply(listing(FILES, etag="0" * 32))
        headers = {"ETag": f'"{"0" * 32}"', "x-amz-server-side-encryption": "aws:kms"}
        return replace(content(FILES, request), headers=headers)

    gateway.answer = answer
    assert tree(settings) == FILES


@pytest.mark.parametrize("encode", [form_encoded, quote, None], ids=["+", "%20", "not encoded"])
def test_keys_with_spaces_and_signs(
    settings: SyncSettings, gateway: Gateway, encode: Encode | None
):
    names = ["my notes.md", "my+notes.md", "my%20notes.md", "a*b.py", "é/~a&b.py"]
    files = {f"code/{name}": name.encode() for name in names}
    gateway.answer = behave(files, encode)
    assert tree(settings) == files


def test_pages(settings: SyncSettings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        if request.key:
            return content(FILES, request)
        at = int(request.query.get("continuation-token", "0"))
        page = dict(list(FILES.items())[at : at + 1])
        return Reply(listing(page, str(at + 1) if at + 1 < len(FILES) else ""))

    gateway.answer = answer
    assert tree(settings) == FILES


def test_pages_without_end(settings: SyncSettings, gateway: Gateway):
    gateway.answer = lambda _: Reply(listing({}, "same"))
    assert failure(settings).reason == "FetchFailed"
    tokens = iter(range(10**9))
    gateway.answer = lambda _: Reply(listing({}, str(next(tokens))))
    assert failure(replace(settings, fetch_timeout=0.5)).reason == "FetchFailed"


@pytest.mark.parametrize("encoding", ["utf-32", "none", "cp932"])
def test_a_list_in_another_encoding(settings: SyncSettings, gateway: Gateway, encoding: str):
    page = f'<?xml version="1.0" encoding="{encoding}"?><ListBucketResult/>'
    gateway.answer = lambda _: Reply(page.encode())
    assert failure(settings).reason == "FetchFailed"


def test_more_objects_than_a_workspace_may_have(settings: SyncSettings):
    assert failure(replace(settings, limits=ArchiveLimits(entries=2))).reason == "WorkspaceTooLarge"
    assert failure(replace(settings, limits=ArchiveLimits(bytes=100))).reason == "WorkspaceTooLarge"


@pytest.mark.parametrize("body", [b"<html>", b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", b"\0"])
def test_a_response_that_is_no_list(settings: SyncSettings, gateway: Gateway, body: bytes):
    gateway.answer = lambda _: Reply(body)
    assert failure(settings).reason in ("FetchFailed", "FetchFailed")


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
    settings: SyncSettings, gateway: Gateway, name: str, sub_path: str
):
    content = archive(FILES) if name.endswith("zip") else tarred(FILES)
    gateway.answer = behave({name: content})
    settings = replace(settings, url=gateway.url(f"bucket/{name}"), sub_path=sub_path)
    prefix = "" if sub_path else "code/"
    found = {path.removeprefix("code/"): body for path, body in tree(settings).items()}
    assert found == {prefix + name.removeprefix("code/"): body for name, body in FILES.items()}


@pytest.mark.parametrize("name", ["code.zip", "code.tar"])
def test_an_archive_that_cannot_be_unpacked(settings: SyncSettings, gateway: Gateway, name: str):
    gateway.answer = behave({name: b"<html>"})
    error = failure(replace(settings, url=gateway.url(f"bucket/{name}")))
    assert error.reason == "InvalidArchive"
    assert "upload" not in error.message


def test_an_archive_without_that_folder(settings: SyncSettings, gateway: Gateway):
    gateway.answer = behave({"code.zip": archive(FILES)})
    wanted = replace(settings, url=gateway.url("bucket/code.zip"), sub_path="none")
    assert failure(wanted).reason == "SourceNotFound"
    assert failure(replace(wanted, limits=ArchiveLimits(bytes=10))).reason == "WorkspaceTooLarge"


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
    settings: SyncSettings, gateway: Gateway, status: int, code: str, reason: str
):
    body = f"<Error><Code>{code}</Code><Message>planted\x1b[2J</Message></Error>".encode()
    gateway.answer = lambda _: Reply(body, status)
    error = failure(settings)
    assert (error.reason, error.permanent) == (reason, False)
    assert error.message.isprintable()


def test_the_message_of_a_gateway_is_printed_without_the_secret(
    settings: SyncSettings, gateway: Gateway, tmp_path: Path
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


def test_the_pinned_content_or_an_error(settings: SyncSettings, gateway: Gateway):
    first = fetch(replace(settings, digest="1"))
    assert fetch(replace(settings, digest="1", commit=first.commit)) == first
    Claim(settings.directory).directory.joinpath(".sync_success").unlink()
    gateway.answer = behave(FILES | {"code/train.py": b"other"})
    with pytest.raises(SyncError) as caught:
        fetch(replace(settings, digest="1", commit=first.commit))
    assert (caught.value.reason, caught.value.permanent) == ("SourceChanged", True)
    assert Claim(settings.directory).marker() is None


@pytest.mark.long
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
