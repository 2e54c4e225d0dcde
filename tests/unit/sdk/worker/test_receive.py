"""How a warm pod updates its workspace with the directory of the client."""

import base64
import hashlib
import os
import stat
import zlib
from pathlib import Path

import pytest

from torchrun_sdk.spec import CALLS, FOLDER
from torchrun_sdk.worker.receive import Receiver


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / FOLDER / CALLS).mkdir(parents=True)
    return tmp_path


def deliver(root: Path, files: dict[str, bytes], mode: str = "644") -> list[str]:
    """Deliver a directory as a client does. A path that ends in / is an empty directory.

    Returns the paths whose contents the pod requested.
    """
    paths = sorted(files)
    lines = [
        f"- 0 dir {path[:-1]}"
        if path.endswith("/")
        else f"{hashlib.sha256(files[path]).hexdigest()} {len(files[path])} {mode} {path}"
        for path in paths
    ]
    receiver = Receiver(root)
    packed = zlib.compress("\n".join(lines).encode())
    numbers = receiver.wants(base64.b64encode(packed).decode())
    for number in numbers:
        data = base64.b64encode(files[paths[number]]).decode()
        receiver.content(number, data, more=False)
    receiver.finish()
    return [paths[number] for number in numbers]


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and FOLDER not in path.parts
    }


def test_only_missing_files_are_requested_and_those_of_the_run_stay(root: Path) -> None:
    assert deliver(root, {"a": b"1", "b": b"1", "gone/c": b"1"}) == ["a", "b", "gone/c"]
    (root / "own").write_bytes(b"of the run")
    assert deliver(root, {"a": b"1", "b": b"2"}) == ["b"]
    assert contents(root) == {"a": b"1", "b": b"2", "own": b"of the run"}
    assert not (root / "gone").exists()


@pytest.mark.parametrize("kinds", [["x", "x/y", "x"], ["x", "x/", "x"], ["x/", "x/y/z", "x/"]])
def test_a_file_and_a_directory_may_take_the_place_of_each_other(
    root: Path, kinds: list[str]
) -> None:
    for number, name in enumerate(kinds):
        files = {"a": b"1", name: str(number).encode()}
        deliver(root, files)
        assert (root / name).is_dir() == name.endswith("/")
        expected = {path: content for path, content in files.items() if not path.endswith("/")}
        assert contents(root) == expected


def test_a_change_of_the_mode_alone_is_delivered(root: Path) -> None:
    files = {"run": b"#!/bin/sh"}
    for mode, wanted in (("644", ["run"]), ("755", []), ("644", [])):
        assert deliver(root, files, mode) == wanted, "its content is not sent again"
        assert stat.S_IMODE((root / "run").stat().st_mode) == int(mode, 8)


def test_a_file_whose_mode_cannot_be_changed_is_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of another user, in a directory that is writable for the pod."""
    deliver(root, {"run": b"#!/bin/sh"})
    chmod = os.chmod

    def refuse(path: Path, mode: int, **options: bool) -> None:
        if path == root / "run":
            raise PermissionError(1, "Operation not permitted")
        chmod(path, mode, **options)

    monkeypatch.setattr(os, "chmod", refuse)
    assert deliver(root, {"run": b"#!/bin/sh"}, "755") == ["run"]
    assert stat.S_IMODE((root / "run").stat().st_mode) == 0o755
