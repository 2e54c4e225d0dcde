"""The token of uploads: one for each job, the same from every directory."""

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kubectl_torchrun.cluster.kubectl import ClusterNamespace
from kubectl_torchrun.upload import upload_token

HERE = ClusterNamespace("https://cluster.example", "ml")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    upload_token._key.cache_clear()
    yield tmp_path / "kubectl-torchrun"
    upload_token._key.cache_clear()


def again(where: ClusterNamespace, job: str) -> str:
    """The token in another process of this user."""
    upload_token._key.cache_clear()
    return upload_token.upload_token(where, job)


def test_the_same_job_has_the_same_token_and_no_other_has(state: Path) -> None:
    token = again(HERE, "train")
    assert again(HERE, "train") == token
    others = {
        again(HERE, "other"),
        again(HERE._replace(name="other"), "train"),
        again(HERE._replace(server="https://other.example"), "train"),
    }
    assert len(others | {token}) == 4
    key = state / "upload-key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.unlink()
    assert again(HERE, "train") != token


def test_the_token_cannot_be_derived_from_the_job() -> None:
    token = again(HERE, "train")
    assert len(upload_token.token_sha256(token)) == 64
    assert token not in upload_token.token_sha256(token)


def test_two_concurrent_commands_share_one_key(state: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: again(HERE, "train"), range(50)))
    assert len(tokens) == 1
    assert [path.name for path in state.iterdir()] == ["upload-key"]


def test_a_read_only_home_directory_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    first = upload_token.upload_token(HERE, "train")
    assert upload_token.upload_token(HERE, "train") == first, (
        "the token is stable within one command"
    )
    assert again(HERE, "train") != first
