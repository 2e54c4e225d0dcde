"""Git servers that are missing, misbehave or are not trusted."""

import random
from dataclasses import replace

import pytest

from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.git.errors import explain
from torchrun_runtime.sync.settings import SyncSettings
from unit.runtime.git_server import GitServer, repository
from unit.runtime.syncing import fetch_failure

pytestmark = pytest.mark.long  # processes


def test_a_full_disk_is_explained():
    error = explain("fatal: write error: No space left on device", "https://host/a.git")
    assert (error.reason, error.permanent) == ("WorkspaceFull", False)
    assert "Increase volumes.workspace.size in a new job or choose a smaller" in error.message


def test_a_missing_repository(git_settings: SyncSettings, git_server: GitServer):
    git_server.root.mkdir()
    error = fetch_failure(git_settings)
    assert (error.reason, error.permanent) == ("SourceNotFound", False)


def test_a_server_whose_authority_is_unknown(git_settings: SyncSettings, git_server: GitServer):
    repository(git_server.root / "train", {"a": b"1"})
    error = fetch_failure(replace(git_settings, secret="", secret_directory=None))
    assert error.reason == "CertificateInvalid"
    assert "ca.crt" in error.message


@pytest.mark.parametrize(
    "where", ["http://169.254.169.254", "https://localhost:1", "file:///etc", "ext::sh -c id"]
)
def test_redirects_are_not_followed(git_settings: SyncSettings, git_server: GitServer, where: str):
    git_server.redirect = where
    error = fetch_failure(git_settings)
    assert (error.reason, error.permanent) == ("Redirected", True), error.message


def test_a_broken_connection(git_settings: SyncSettings, git_server: GitServer):
    noise = random.Random(1).randbytes(1 << 20)
    repository(git_server.root / "train", {"noise": noise})
    git_server.cut = 1 << 18
    error = fetch_failure(git_settings)
    assert (error.reason, error.permanent) == ("FetchFailed", False)
    git_server.cut = 0
    assert fetch(git_settings).files == 1


def test_an_unreachable_server(git_settings: SyncSettings):
    error = fetch_failure(replace(git_settings, url="https://127.0.0.1:1/train"))
    assert (error.reason, error.permanent) == ("FetchFailed", False)
