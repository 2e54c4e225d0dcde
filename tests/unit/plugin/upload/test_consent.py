"""Likely secrets that .torchrunignore includes: named, and asked about once."""

from pathlib import Path

import pytest

from kubectl_torchrun.upload import consent


class System:
    """A terminal or a pipe, in the place of `sys`."""

    def __init__(self, is_terminal: bool) -> None:
        self.stdin = self.stderr = self
        self.isatty = lambda: is_terminal


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return []


def sent(
    directory: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> set[str]:
    """The files of the workspace. answer: what the user types; None without a terminal."""

    def ask(question: str) -> str:
        questions.append(question)
        return answer or ""

    monkeypatch.setattr(consent, "sys", System(answer is not None))
    monkeypatch.setattr(consent, "ask", ask)
    return {file.path for file in consent.scan(directory).files} - {".torchrunignore"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    directory = tmp_path / "clone"
    (directory / ".aws").mkdir(parents=True)
    for name in (".env", "id.pem", ".aws/credentials", "train.py"):
        (directory / name).write_text(name)
    (directory / ".torchrunignore").write_text("!.env\n!.aws/\n")
    return directory


def test_a_secret_is_sent_only_after_a_yes_which_is_kept(
    clone: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for refusal in (None, "", "n"):
        assert sent(clone, questions, monkeypatch, refusal) == {"train.py"}
    assert questions == 2 * [
        ".torchrunignore includes files that may contain secrets: .aws, .env. Upload them? [y/N]:"
    ]
    allowed = {".env", ".aws/credentials", "train.py"}
    assert sent(clone, questions, monkeypatch, "y") == allowed
    assert sent(clone, questions, monkeypatch, None) == allowed
    assert sent(clone, questions, monkeypatch, "") == allowed
    assert len(questions) == 3


def test_a_new_secret_is_a_new_question(
    clone: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(clone, questions, monkeypatch, "yes")
    (clone / ".torchrunignore").write_text("!.env\n!.aws/\n!*.pem\n")
    assert "id.pem" not in sent(clone, questions, monkeypatch, "")
    assert questions[1:] == [
        ".torchrunignore includes files that may contain secrets: id.pem. Upload them? [y/N]:"
    ]


def test_an_overlay_is_selected_by_the_user(
    clone: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(consent, "sys", System(False))
    files = consent.scan(tmp_path / "empty", clone).files
    assert {".env", ".aws/credentials"} <= {file.path for file in files}
