from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchrun_cluster import packages


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_what_another_process_has_installed_meanwhile_is_not_installed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    locked: list[Path] = []

    @contextmanager
    def other_process_installs(path: Path) -> Iterator[None]:
        """The lock is free after the other process has done its work."""
        program(tmp_path / "wanted", "exit 0")
        locked.append(path)
        yield

    program(tmp_path / "apt-get", "exit 100")
    monkeypatch.setattr(packages, "SEARCH_PATH", str(tmp_path))
    monkeypatch.setattr(packages.artefacts, "locked", other_process_installs)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    packages.ensure({"wanted": "package"})
    assert len(locked) == 1
    packages.ensure({"wanted": "package"})
    assert len(locked) == 1
