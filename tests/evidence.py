"""The evidence of a failed test: the end of each text in its report, the full text in build/NAME/TEST.

The end of the failure itself stands last again, because a CI system may keep only the last lines.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[1] / "build"
LINES = 60
CHARACTERS = 6_000
"""Of one text in a report."""

Texts = Iterator[tuple[str, str]]
"""Titles and texts. One that raises is the last; what it raised is kept in its place."""


def attach(
    report: pytest.TestReport, folder: Path, texts: Texts, quiet: tuple[str, ...] = ()
) -> None:
    """Save texts and captured output in a folder of the test, and show the end of each. Never raises.

    Texts whose title begins with one of `quiet` are saved and not shown.
    """
    path, _, test = report.nodeid.partition("::")
    # A failure of the teardown must not replace the evidence of the test itself.
    phase = "-teardown" if report.when == "teardown" else ""
    directory = folder / (_file_name(f"{Path(path).stem}-{test}") + phase)
    captured = [f"{title}\n{text}" for title, text in report.sections]
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for title, text in texts:
            file = directory / f"{_file_name(title)}.txt"
            file.write_text(text)
            if not title.startswith(quiet):
                report.sections.append((title, end_of(text, file)))
        parts = (f"{report.nodeid}: {report.when}", report.longreprtext, *captured)
        (directory / "test.txt").write_text("\n\n".join(parts) + "\n")
    except Exception as error:  # the failure of the test must not be hidden
        report.sections.append(("evidence", f"nothing more was saved: {error!r}"))
    failure = end_of(report.longreprtext, directory / "test.txt")
    report.sections.append(("evidence", f"all of it is in {directory}\n{failure}"))


def _file_name(title: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", title).strip("-")[:150]


def end_of(text: str, whole: Path) -> str:
    """The last lines, with the path of the full text if some are omitted."""
    shown = "\n".join(text.splitlines()[-LINES:])[-CHARACTERS:]
    if len(shown) >= len(text.rstrip("\n")):
        return shown
    return f"... the last lines of {whole}\n{shown}"
