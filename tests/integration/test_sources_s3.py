"""A workspace from a bucket of a real gateway, public and private, and each kind of failure."""

import hashlib
import io
import json
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from ports import free_port
from torchrun_cluster import binaries
from torchrun_controller.client.credentials import tls_context
from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.s3.signature import KeyPair, sign, target
from torchrun_runtime.sync.settings import SyncSettings
from unit.runtime.git_server import authority

KEYS = KeyPair("planted-access-key", "planted-secret-key", "us-east-1")
UP_WITHIN = 120.0
FILES = {
    "train.py": b"print()",
    "pkg/a b+c=d&e.py": b"1",
    "pkg/\u6f22/empty": b"",
    "noise.bin": hashlib.shake_256(b"n").digest(5 << 20),
}


@dataclass
class Gateway:
    """versitygw on a folder, with TLS."""

    url: str
    host: str
    ca: Path

    def put(self, path: str, body: bytes = b"", query: dict[str, str] | None = None) -> None:
        """Create a bucket or an object, or set what the query names."""
        where = target(f"/{path}", query or {})
        sha256 = hashlib.sha256(body).hexdigest()
        headers = sign(KEYS, "PUT", self.host, where, datetime.now(UTC), sha256)
        verify = tls_context(str(self.ca))
        answer = httpx.put(
            self.url + where, content=body, headers=headers, verify=verify, timeout=60
        )
        assert answer.status_code in (200, 204), answer.text

    def publish(self, bucket: str) -> None:
        """Make a bucket public."""
        policy = {
            "Statement": [
                {
                    "Effect": "Allow",
                    "Principal": "*",
                    "Action": ["s3:ListBucket", "s3:GetObject"],
                    "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
                }
            ]
        }
        self.put(bucket, json.dumps(policy).encode(), {"policy": ""})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    program = binaries.ensure(["versitygw"])["versitygw"]
    folder = tmp_path_factory.mktemp("gateway")
    ca = authority(folder / "pki")
    (folder / "data").mkdir()
    port = free_port()
    command = [
        *(str(program), "--quiet", "--port", f"127.0.0.1:{port}"),
        *("--cert", str(folder / "pki" / "crt"), "--key", str(folder / "pki" / "key")),
        *("--access", KEYS.access_key_id, "--secret", KEYS.secret_access_key),
        *("--region", KEYS.region, "posix", str(folder / "data")),
    ]
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log)
    running = Gateway(f"https://localhost:{port}", f"localhost:{port}", ca)
    try:
        deadline = time.monotonic() + UP_WITHIN
        while True:
            try:
                httpx.get(running.url, verify=tls_context(str(ca)), timeout=60)
                break
            except httpx.TransportError:
                assert started.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        for bucket in ("private", "public"):
            running.put(bucket)
            for name, content in FILES.items():
                running.put(f"{bucket}/code/{name}", content)
            running.put(f"{bucket}/code.zip", zipped())
            running.put(f"{bucket}/code.tar.gz", tarred("w:gz"))
            running.put(f"{bucket}/code.tar", tarred("w"))
        running.publish("public")
        yield running
    finally:
        started.terminate()
        started.wait(60)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(mode: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in FILES.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def secret(tmp_path: Path, gateway: Gateway) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "ca.crt").write_bytes(gateway.ca.read_bytes())
    return folder


@pytest.fixture
def keys(secret: Path, gateway: Gateway) -> Path:
    (secret / "AWS_ACCESS_KEY_ID").write_text(KEYS.access_key_id)
    (secret / "AWS_SECRET_ACCESS_KEY").write_text(f"{KEYS.secret_access_key}\n")
    (secret / "AWS_ENDPOINT_URL").write_text(gateway.url)
    return secret


@pytest.fixture
def settings(tmp_path: Path, secret: Path) -> SyncSettings:
    directory = tmp_path / "claim"
    directory.mkdir()
    return SyncSettings(
        source="s3", directory=directory, secret="s", secret_directory=secret, fetch_timeout=60
    )


def tree(settings: SyncSettings) -> dict[str, bytes]:
    marker = fetch(settings)
    assert len(marker.commit) == 64
    root = Claim(settings.directory).tree(marker.revision)
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def failure(settings: SyncSettings) -> SyncError:
    with pytest.raises(SyncError) as caught:
        fetch(settings)
    return caught.value


@pytest.mark.parametrize("path", ["code", "code/", "code.zip", "code.tar", "code.tar.gz"])
def test_a_public_bucket(settings: SyncSettings, gateway: Gateway, path: str):
    assert tree(replace(settings, url=f"{gateway.url}/public/{path}")) == FILES


@pytest.mark.parametrize("path", ["code", "code/", "code.zip", "code.tar", "code.tar.gz"])
def test_a_private_bucket_by_its_name(settings: SyncSettings, keys: Path, path: str):
    assert tree(replace(settings, url=f"s3://private/{path}")) == FILES


@pytest.mark.parametrize("path", ["code", "code.zip", "code.tar.gz"])
def test_a_folder_of_it(settings: SyncSettings, keys: Path, path: str):
    found = tree(replace(settings, url=f"s3://private/{path}", sub_path="pkg"))
    assert found == {"a b+c=d&e.py": b"1", "\u6f22/empty": b""}


def test_more_objects_than_a_page(settings: SyncSettings, gateway: Gateway, keys: Path):
    for number in range(1005):
        gateway.put(f"private/many/{number}", str(number).encode())
    found = tree(replace(settings, url="s3://private/many"))
    assert found == {str(number): str(number).encode() for number in range(1005)}


def test_the_digest_is_computed_from_the_content(
    settings: SyncSettings, gateway: Gateway, keys: Path
):
    gateway.put("private/moving/a", b"1")
    first = fetch(replace(settings, url="s3://private/moving", digest="1"))
    assert fetch(replace(settings, url="s3://private/moving", digest="2")).commit == first.commit
    gateway.put("private/moving/a", b"2")
    lost = settings.directory.with_name("a new claim")
    lost.mkdir()
    pinned = replace(settings, url="s3://private/moving", digest="2", commit=first.commit)
    assert fetch(pinned).commit == first.commit
    assert failure(replace(pinned, directory=lost)).reason == "SourceChanged"
    assert fetch(replace(pinned, digest="3")).commit != first.commit, (
        "a new request fetches the new content"
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://private/none", "SourceNotFound"),
        ("s3://private/none.zip", "SourceNotFound"),
        ("s3://no-such-bucket/code", "SourceNotFound"),
    ],
)
def test_missing_objects_and_refs(settings: SyncSettings, keys: Path, url: str, reason: str):
    error = failure(replace(settings, url=url))
    assert (error.reason, error.permanent) == (reason, False)


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
@pytest.mark.parametrize("path", ["code", "code.zip"])
def test_a_wrong_key(settings: SyncSettings, keys: Path, name: str, path: str):
    (keys / name).write_text("another-planted-value")
    error = failure(replace(settings, url=f"s3://private/{path}"))
    assert (error.reason, error.permanent) == ("AccessDenied", False)
    assert "secretRef" in error.message
    assert "planted" not in error.message


def test_a_private_bucket_without_a_key(settings: SyncSettings, gateway: Gateway):
    error = failure(replace(settings, url=f"{gateway.url}/private/code"))
    assert (error.reason, error.permanent) == ("AccessDenied", False)


def test_an_incomplete_key_pair(settings: SyncSettings, keys: Path):
    (keys / "AWS_SECRET_ACCESS_KEY").unlink()
    error = failure(replace(settings, url="s3://private/code"))
    assert (error.reason, error.permanent) == ("SecretInvalid", False)


def test_another_region(settings: SyncSettings, keys: Path):
    (keys / "AWS_REGION").write_text("eu-west-1")
    error = failure(replace(settings, url="s3://private/code"))
    assert error.reason in ("WrongRegion", "AccessDenied")
    assert "us-east-1" in error.message


def test_an_unknown_authority(settings: SyncSettings, keys: Path):
    (keys / "ca.crt").unlink()
    assert failure(replace(settings, url="s3://private/code")).reason == "CertificateInvalid"
