"""How the launcher waits for the workspace, copies it and starts in it."""

import os
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest

from torchrun_runtime.launch import workspace as copying
from torchrun_runtime.launch.workspace import copy_tree
from unit.runtime.launching import Launcher
from unit.runtime.serving import publish

pytestmark = pytest.mark.long  # processes

MARKER = '{"revision": 1}'


def workspace(directory: Path, ready: bool = True) -> "dict[str, str]":
    claim = directory / "claim"
    files = {
        "train.sh": b"#!/bin/sh\necho from $PWD\n",
        "pkg/data.bin": os.urandom(3_000_000),
    }
    publish(claim, files, "pkg/empty")
    (claim / "revisions/1/tree/train.sh").chmod(0o755)
    if not ready:
        (claim / ".sync_success").unlink()
    return {
        "TORCHRUN_WORKSPACE_SOURCE": str(claim),
        "TORCHRUN_WORKSPACE_TARGET": str(directory / "app"),
    }


def test_threads_that_copy_get_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[set[int]] = []
    copy_file = shutil.copyfile

    def copyfile(source: str, target: str) -> None:
        blocked.append({int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())})
        copy_file(source, target)

    monkeypatch.setattr(copying.shutil, "copyfile", copyfile)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/train.py").touch()
    copy_tree(str(tmp_path / "source"), str(tmp_path / "target"))
    assert all({signal.SIGTERM, signal.SIGCHLD, signal.SIGRTMAX - 1} <= mask for mask in blocked)
    assert len(blocked) == 1


def test_a_missing_program_names_the_folder_that_the_workspace_hides(launcher: Launcher) -> None:
    environment = workspace(launcher.directory)
    hidden = environment["TORCHRUN_WORKSPACE_TARGET"] + "/.venv/bin"
    result = launcher.run("no-such-tool", **environment, PATH=f"{hidden}:/usr/bin:/bin")
    assert (result.exit_code, result.message["reason"]) == (127, "CommandNotFound")
    assert f"PATH names {hidden}, which does not exist" in str(result.message["message"])


def test_copies_the_workspace_and_runs_in_it(launcher: Launcher) -> None:
    result = launcher.run("./train.sh", **workspace(launcher.directory))
    app = launcher.directory / "app"
    assert result.out == f"from {app}\n"
    copied = (app / "pkg/data.bin").read_bytes()
    assert copied == (launcher.directory / "claim/revisions/1/tree/pkg/data.bin").read_bytes()
    assert (app / "pkg/empty").is_dir()
    assert "2 files, 3000025 bytes" in result.err


def test_works_without_a_usable_state_directory(launcher: Launcher) -> None:
    missing = str(launcher.directory / "missing")
    result = launcher.run("echo started", TORCHRUN_STATE_DIR=missing)
    assert (result.exit_code, result.out) == (0, "started\n")
    assert f"running without the state directory {missing}: No such file" in result.err


def test_waits_for_the_marker(launcher: Launcher) -> None:
    settings = workspace(launcher.directory, ready=False)
    launched = launcher.start("echo started", **settings)
    (launcher.directory / "marker").write_text(MARKER)
    (launcher.directory / "marker").rename(launcher.directory / "claim/.sync_success")
    assert launched.end().out == "started\n"


def test_reports_a_missing_marker(launcher: Launcher) -> None:
    settings = workspace(launcher.directory, ready=False)
    result = launcher.run("echo started", **settings, TORCHRUN_SYNC_WAIT_SECONDS="0.3")
    assert (result.exit_code, result.out) == (125, "")
    assert result.message["reason"] == "WorkspaceNotReady"
    assert ".sync_success is missing" in str(result.message["message"])


def test_ends_at_once_when_stopped_before_the_command(launcher: Launcher) -> None:
    settings = workspace(launcher.directory, ready=False)
    launched = launcher.start("echo started", **settings)
    # Before its handlers are installed, SIGTERM would end the interpreter.
    status = Path(f"/proc/{launched.process.pid}/status")
    while not _catches(status, signal.SIGTERM):
        time.sleep(0.01)
    launched.stop()
    result = launched.end()
    assert (result.exit_code, result.out) == (143, "")
    assert result.message["reason"] == "Stopped"


def _catches(status: Path, number: int) -> bool:
    mask = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def test_reports_a_missing_working_directory(launcher: Launcher) -> None:
    result = launcher.run("true", TORCHRUN_WORKING_DIR="/no/such/place")
    assert result.exit_code == 125
    assert result.message["reason"] == "WorkingDirMissing"
    assert "/no/such/place" in str(result.message["message"])


def test_copying_keeps_modes_and_refuses_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for mode in (0o644, 0o755, 0o444):
        (source / f"{mode:o}").touch(mode)
        (source / f"{mode:o}").chmod(mode)
    copy_tree(str(source), str(tmp_path / "target"))
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "target").iterdir()
    }
    assert modes == {"644": 0o644, "755": 0o755, "444": 0o644}
    (source / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="neither a file nor a directory"):
        copy_tree(str(source), str(tmp_path / "again"))
