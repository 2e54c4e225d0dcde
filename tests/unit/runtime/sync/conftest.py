"""A git server over https, and the settings of a sync pod that fetches from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.sync.settings import SyncSettings
from unit.runtime.git_server import GitServer, authority, serving


@pytest.fixture(scope="session")
def git_pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    authority(folder)
    return folder


@pytest.fixture
def git_server(tmp_path: Path, git_pki: Path) -> Iterator[GitServer]:
    with serving(tmp_path / "repositories", git_pki) as running:
        yield running


@pytest.fixture
def git_secret(tmp_path: Path, git_pki: Path) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "ca.crt").write_bytes((git_pki / "ca.crt").read_bytes())
    return folder


@pytest.fixture
def git_settings(tmp_path: Path, git_server: GitServer, git_secret: Path) -> SyncSettings:
    directory = tmp_path / "claim"
    directory.mkdir()
    return SyncSettings(
        source="git",
        url=git_server.url("train"),
        directory=directory,
        secret="login",
        secret_directory=git_secret,
        fetch_timeout=60,
    )


@pytest.fixture
def git_environment(git_settings: SyncSettings) -> dict[str, str]:
    """The same source and secret for torchrun-sync in a process of its own."""
    return {
        "TORCHRUN_SYNC_SOURCE": git_settings.source,
        "TORCHRUN_SYNC_URL": git_settings.url,
        "TORCHRUN_SYNC_SECRET": git_settings.secret,
        "TORCHRUN_SYNC_SECRET_DIR": str(git_settings.secret_directory),
    }
