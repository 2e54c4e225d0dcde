"""Logins to private repositories, and secrets that must not appear in any output."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.secret import Secret
from torchrun_runtime.sync.settings import SyncSettings
from unit.runtime.git_server import (
    PASSWORD,
    GitServer,
    repository,
)
from unit.runtime.syncing import fetch_failure, process


@pytest.mark.long
def test_a_private_repository(git_settings: SyncSettings, git_server: GitServer, git_secret: Path):
    repository(git_server.root / "train", {"a": b"1"})
    git_server.login = f"me:{PASSWORD}"
    (git_secret / "username").write_text("me\n")
    (git_secret / "password").write_text(f"{PASSWORD}\n")
    assert fetch(git_settings).files == 1


@pytest.mark.long
@pytest.mark.parametrize("given", ["", "another-password"])
def test_a_wrong_or_missing_password(
    git_settings: SyncSettings, git_server: GitServer, git_secret: Path, given: str
):
    repository(git_server.root / "train", {"a": b"1"})
    git_server.login = f"me:{PASSWORD}"
    if given:
        (git_secret / "username").write_text("me")
        (git_secret / "password").write_text(given)
    error = fetch_failure(git_settings)
    assert (error.reason, error.permanent) == ("AccessDenied", False)
    assert "secretRef" in error.message
    assert "another" not in error.message


def test_a_missing_secret(git_settings: SyncSettings, git_server: GitServer, tmp_path: Path):
    (tmp_path / "none").mkdir()
    error = fetch_failure(replace(git_settings, secret_directory=tmp_path / "none"))
    assert (error.reason, error.permanent) == ("SecretNotFound", False)
    assert "login" in error.message


def test_a_secret_without_its_key(git_settings: SyncSettings, git_secret: Path):
    (git_secret / "ca.crt").unlink()
    (git_secret / "token").write_text("t")
    error = fetch_failure(git_settings)
    assert (error.reason, error.permanent) == ("SecretInvalid", False)
    assert "password" in error.message
    assert "token" in error.message


@pytest.mark.long
def test_no_secret_in_log_message_or_arguments(
    tmp_path: Path, git_server: GitServer, git_secret: Path, git_environment: dict[str, str]
):
    """Read command lines and environments from /proc while torchrun-sync fetches."""
    repository(git_server.root / "train", {"a": b"1"})
    git_server.login = "me:other"
    (git_secret / "username").write_text("me")
    (git_secret / "password").write_text(PASSWORD)
    arguments: set[bytes] = set()
    url = git_server.url("train").encode()
    seen = threading.Event()
    # A git that is answered at once may end before it is looked at.
    git_server.before = lambda: seen.wait(120)
    with process(tmp_path, **git_environment) as running:
        while running.process.poll() is None:
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    words = (entry / "cmdline").read_bytes()
                    arguments.add(words)
                    if (entry / "comm").read_bytes().startswith(b"git"):
                        arguments.add((entry / "environ").read_bytes())
                        if url in words:
                            seen.set()
                except OSError:
                    continue
        code, message = running.end()
        assert running.process.stdout
        log = running.process.stdout.read()
    assert (code, message["reason"]) == (1, "AccessDenied")
    assert seen.is_set()
    assert PASSWORD.encode() not in b"".join(arguments)
    assert PASSWORD not in log + json.dumps(message)
    assert "AccessDenied" in log


def test_a_password_in_a_server_message_is_redacted(tmp_path: Path):
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "ssh-privatekey").write_text("-----BEGIN-----\nline-of-the-key\n")
    (tmp_path / "username").write_text("train")
    answer = f"remote: no {PASSWORD} of line-of-the-key at https://me:x@git.example/train"
    scrubbed = Secret("login", tmp_path).scrub(answer)
    assert scrubbed == "remote: no *** of *** at https://git.example/train"
