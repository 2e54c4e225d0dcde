"""The two commands end with a message that says what to do next."""

from pathlib import Path

import pytest

from release_checkout import FEW, copy_checkout
from torchrun_release import versions
from torchrun_release.__main__ import main


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy_checkout(tmp_path / "checkout", paths=FEW)
    return tmp_path / "checkout"


def test_a_refused_release_changes_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "dist").mkdir()
    (checkout / "dist" / "install.yaml").write_text("earlier")
    output = ["--output", str(checkout / "dist")]
    assert main(["--root", str(checkout), "build", "12.34.56", *output]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: these files have another version than 12.34.56")
    assert "make version VERSION=12.34.56" in message
    assert (checkout / "dist" / "install.yaml").read_text() == "earlier"


def test_the_version_is_set_with_the_next_step(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(checkout), "version", "12.34.56"]) == 0
    assert versions.current(checkout) == "12.34.56"
    lines = capsys.readouterr().err.splitlines()
    assert lines[:-2] == [path for path, _ in versions.PLACES]
    assert "CHANGELOG.md" in lines[-1]
    assert main(["--root", str(checkout), "version", "12.34.56"]) == 0
    assert capsys.readouterr().err == "all files have 12.34.56\n"


def test_a_wrong_version_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = versions.current(checkout)
    assert main(["--root", str(checkout), "version", "v2"]) == 1
    assert "error: 'v2' is no version" in capsys.readouterr().err
    assert versions.current(checkout) == before
