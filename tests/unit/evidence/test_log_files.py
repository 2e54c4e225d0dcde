"""Readers of growing log files see complete lines only."""

from pathlib import Path

import pytest

from integration.audit import AuditLog
from log_files import find_end, read_complete_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n{"c":')
    return path


def test_a_line_without_its_end_is_not_read(log: Path) -> None:
    assert read_complete_lines(log) == [b'{"a": 1}\n', b'{"b": 2}\n']


def test_reading_starts_at_a_position(log: Path) -> None:
    assert read_complete_lines(log, start=9) == [b'{"b": 2}\n']


def test_the_position_after_the_last_line_does_not_split_the_next_one(log: Path) -> None:
    end = find_end(log)
    with log.open("ab") as file:
        file.write(b" 3}\n")
    assert read_complete_lines(log, end) == [b'{"c": 3}\n']


def test_the_size_of_an_audit_log_is_that_of_its_complete_lines(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path)
    assert audit.size() == 0
    audit.path.write_bytes(b'{"a": 1}\n{"b"')
    assert audit.size() == 9
