"""A workspace from git over ssh, with a real sshd, and each kind of failure."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.settings import SyncSettings
from unit.runtime.ssh_server import Sshd, serving


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with serving(tmp_path_factory.mktemp("sshd")) as started:
        yield started


@pytest.fixture
def secret(tmp_path: Path, sshd: Sshd) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "ssh-privatekey").write_bytes((sshd.folder / "user").read_bytes())
    (folder / "ssh-privatekey").chmod(0o600)
    (folder / "known_hosts").write_text(sshd.known_hosts())
    return folder


@pytest.fixture
def settings(tmp_path: Path, sshd: Sshd, secret: Path) -> SyncSettings:
    directory = tmp_path / "claim"
    directory.mkdir()
    return SyncSettings(
        source="git",
        url=sshd.url,
        directory=directory,
        secret="deploy-key",
        secret_directory=secret,
        fetch_timeout=60,
    )


def failure(settings: SyncSettings) -> SyncError:
    with pytest.raises(SyncError) as caught:
        fetch(settings)
    assert Claim(settings.directory).marker() is None
    return caught.value


@pytest.mark.parametrize("ref", ["", "main", "commit"])
def test_a_private_repository(settings: SyncSettings, sshd: Sshd, ref: str):
    command = ["git", "-C", str(sshd.folder / "train"), "rev-parse", "HEAD"]
    commit = subprocess.check_output(command, text=True).strip()
    marker = fetch(replace(settings, ref=commit if ref == "commit" else ref))
    assert (marker.commit, marker.files) == (commit, 2)


def test_an_unauthorized_key(settings: SyncSettings, sshd: Sshd, secret: Path):
    (secret / "ssh-privatekey").write_bytes((sshd.folder / "other").read_bytes())
    error = failure(settings)
    assert (error.reason, error.permanent) == ("AccessDenied", False)


def test_an_invalid_key(settings: SyncSettings, secret: Path):
    (secret / "ssh-privatekey").write_text("-----BEGIN nothing-----\nplanted-nonsense\n")
    error = failure(settings)
    assert error.reason in ("SecretInvalid", "AccessDenied")
    assert "planted" not in error.message


@pytest.mark.parametrize("known", ["", "other"])
def test_an_unknown_host_key(settings: SyncSettings, sshd: Sshd, secret: Path, known: str):
    (secret / "known_hosts").write_text(sshd.known_hosts(known) if known else "# nobody\n")
    error = failure(settings)
    assert (error.reason, error.permanent) == ("HostKeyMismatch", False)
    assert "known_hosts" in error.message


@pytest.mark.parametrize("key", ["ssh-privatekey", "known_hosts"])
def test_a_secret_without_its_key(settings: SyncSettings, secret: Path, key: str):
    (secret / key).unlink()
    error = failure(settings)
    assert (error.reason, error.permanent) == ("SecretInvalid", False)
    assert key in error.message


def test_no_secret_at_all(settings: SyncSettings):
    error = failure(replace(settings, secret="", secret_directory=None))
    assert (error.reason, error.permanent) == ("SecretNotFound", True)
    assert "secretRef" in error.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ref": "no-such-branch"}, "SourceNotFound"),
        ({"ref": "f" * 40}, "SourceNotFound"),
        ({"sub_path": "none"}, "SourceNotFound"),
    ],
)
def test_missing_objects_and_refs(settings: SyncSettings, change: dict[str, str], reason: str):
    error = failure(replace(settings, **change))  # type: ignore[arg-type]
    assert (error.reason, error.permanent) == (reason, False)


def test_a_missing_repository(settings: SyncSettings):
    assert failure(replace(settings, url=f"{settings.url}s")).reason == "SourceNotFound"


def test_an_unreachable_server(settings: SyncSettings):
    error = failure(replace(settings, url="ssh://git@127.0.0.1:1/train"))
    assert (error.reason, error.permanent) == ("FetchFailed", False)
