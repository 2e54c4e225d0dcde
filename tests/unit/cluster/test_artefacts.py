"""Verified files are trusted; missing, cut and changed files are not."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from torchrun_cluster import artefacts


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    finished = tmp_path / "building"
    finished.write_bytes(b"program" * 1000)
    target = tmp_path / "bin" / "program"
    artefacts.adopt(finished, target)
    return target


def test_an_adopted_file_is_complete(artefact: Path) -> None:
    assert artefacts.is_whole(artefact)


def test_a_missing_file_is_incomplete(artefact: Path) -> None:
    artefact.unlink()
    assert not artefacts.is_whole(artefact)


def test_a_file_without_its_record_is_incomplete(artefact: Path) -> None:
    artefacts.record_path(artefact).unlink()
    assert not artefacts.is_whole(artefact)


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '{"size": 1}', '"text"', "null"])
def test_a_broken_record_is_not_trusted(artefact: Path, record: str) -> None:
    artefacts.record_path(artefact).write_text(record)
    assert not artefacts.is_whole(artefact)


def test_a_shortened_file_is_incomplete(artefact: Path) -> None:
    os.truncate(artefact, 10)
    assert not artefacts.is_whole(artefact)


def test_a_file_with_other_bytes_is_incomplete(artefact: Path) -> None:
    artefact.write_bytes(b"PROGRAM" * 1000)
    os.utime(artefact, ns=(1, 1))  # the write may be within the resolution of the clock
    assert not artefacts.is_whole(artefact)


def test_a_touched_file_is_verified_again_and_its_stamp_renewed(artefact: Path) -> None:
    os.utime(artefact, ns=(1, 1))
    assert artefacts.is_whole(artefact)
    assert json.loads(artefacts.record_path(artefact).read_text())["mtime_ns"] == 1


def test_adopting_replaces_file_and_record(artefact: Path, tmp_path: Path) -> None:
    before = artefacts.recorded_sha256(artefact)
    newer = tmp_path / "newer"
    newer.write_bytes(b"newer")
    artefacts.adopt(newer, artefact)
    assert artefacts.is_whole(artefact)
    assert artefacts.recorded_sha256(artefact) != before
    assert not newer.exists()


def test_a_lock_excludes_and_survives_the_deletion_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        waiting.set()
        with artefacts.locked(folder):
            order.append("second")
            assert folder.exists()

    with artefacts.locked(folder):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        order.append("first")
        folder.rmdir()
    thread.join(120)
    assert order == ["first", "second"]
