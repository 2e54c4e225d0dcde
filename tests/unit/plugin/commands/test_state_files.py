"""`state-files`: the files of a job's state directory, and `files`: what would be sent."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from kubectl_torchrun import output
from kubectl_torchrun.__main__ import cli

from ..laptop import Laptop

RUNS = {"startTime": "2026-01-01T00:00:00Z", "phase": "Running"}


@pytest.fixture
def state_folder(laptop: Laptop, claim: Path) -> Path:
    """The state directory of a job with one worker."""
    laptop.job("run", status=RUNS)
    laptop.worker("run", 0)
    for path, text in (("sdk/c1/0.left", "first\n"), ("sdk/c1/1.left", "no end of line")):
        (claim / path).parent.mkdir(parents=True, exist_ok=True)
        (claim / path).write_text(text)
    (claim / "sdk/c1/.0.left.7").write_text("half written")
    return claim


@pytest.mark.long
def test_files_are_printed_with_their_names(laptop: Laptop, state_folder: Path) -> None:
    result = laptop.run("state-files", "run", "sdk")
    assert result.exit_code == 0, result.output
    first, second = "==> sdk/c1/0.left <==\nfirst\n\n", "==> sdk/c1/1.left <==\nno end of line\n"
    assert result.stdout == first + second
    assert laptop.run("state-files", "run", "sdk/c1/1.left").stdout == second


@pytest.mark.long
def test_without_a_path_all_files_are_printed(laptop: Laptop, state_folder: Path) -> None:
    (state_folder / "top").write_bytes(b"\xff\n")
    stdout = laptop.run("state-files", "run").stdout_bytes
    assert stdout.startswith(b"==> sdk/c1/0.left <==\n")
    assert stdout.endswith(b"==> top <==\n\xff\n\n")


@pytest.mark.long
def test_files_are_printed_in_parts(
    laptop: Laptop, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be larger than the memory."""
    (state_folder / "sdk/c1/0.left").write_bytes(b"x" * (1 << 20))
    put_bytes, sizes = output.put_bytes, []

    def put(content: bytes) -> None:
        sizes.append(len(content))
        put_bytes(content)

    monkeypatch.setattr(output, "put_bytes", put)
    assert laptop.run("state-files", "run", "sdk/c1/0.left").exit_code == 0
    assert sum(sizes) > 1 << 20
    assert max(sizes) <= 1 << 16


@pytest.mark.long
def test_names_of_files(laptop: Laptop, state_folder: Path) -> None:
    shown = laptop.run("state-files", "run", "-o", "name").stdout
    assert shown == "sdk/c1/0.left\nsdk/c1/1.left\n"
    assert laptop.run("state-files", "run", "none", "-o", "name").exit_code == 2


@pytest.mark.long
def test_a_missing_file_is_no_cluster_error(laptop: Laptop, state_folder: Path) -> None:
    result = laptop.run("state-files", "run", "other")
    assert result.exit_code == 2
    assert "Job run has no files at other in its state directory." in result.stderr


@pytest.mark.parametrize("path", ["/etc/passwd", "..", "sdk/../../x"])
def test_paths_stay_in_the_state_directory(laptop: Laptop, state_folder: Path, path: str) -> None:
    result = laptop.run("state-files", "run", path)
    assert result.exit_code == 2
    assert "is not below the state directory" in result.stderr
    assert not (state_folder.parents[1] / "execs").exists()


@pytest.mark.long
def test_an_unreadable_file_is_reported(laptop: Laptop, state_folder: Path) -> None:
    (state_folder.parents[1] / "bin" / "sh").write_text("#!/bin/false\n")
    (state_folder.parents[1] / "bin" / "sh").chmod(0o755)
    result = laptop.run("state-files", "run", "sdk")
    assert result.exit_code == 4
    assert "kubectl exec failed: no error message" in result.stderr


def files(*words: str) -> Result:
    return CliRunner().invoke(cli, ["files", *words], catch_exceptions=False)


def test_files_lists_what_would_be_sent(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "large.bin").write_bytes(b"0" * 99)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run me.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run me.sh").chmod(0o755)
    result = files(str(tmp_path))
    assert result.exit_code == 0, result.output
    digest = hashlib.sha256(b"#!/bin/sh\n").hexdigest()
    ignoring = hashlib.sha256(b"*.bin\n").hexdigest()
    assert sorted(result.stdout.splitlines()) == sorted(
        [f"{digest} 10 755 run me.sh", f"{ignoring} 6 644 .gitignore", "- 0 dir empty"]
    )
    assert result.stdout.endswith("\n")


def test_files_notes_what_is_skipped(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TOKEN=1\n")
    (tmp_path / "train.py").write_text("x")
    result = files(str(tmp_path), "-o", "name")
    assert result.stdout == "train.py\n"
    assert "Skipped: .env (may contain a secret)" in result.stderr


def test_files_as_json(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "train.py").write_text("x")
    digest = hashlib.sha256(b"x").hexdigest()
    listed = [
        {"path": "empty", "sha256": "", "size": 0, "mode": "dir"},
        {"path": "train.py", "sha256": digest, "size": 1, "mode": "644"},
    ]
    assert json.loads(files(str(tmp_path), "-o", "json").stdout) == {"files": listed}
    assert yaml.safe_load(files(str(tmp_path), "-o", "yaml").stdout) == {"files": listed}
    assert files(str(tmp_path), "-o", "name").stdout == "empty\ntrain.py\n"


def test_changed_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("one")
    before = files().stdout
    (tmp_path / "train.py").write_text("two")
    after = files().stdout
    assert before != after
    assert after.startswith(hashlib.sha256(b"two").hexdigest())


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert files(str(tmp_path / "none")).exit_code == 2
