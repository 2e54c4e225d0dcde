"""The numbers of docs/faults.md are those of the stored run."""

import json

from faults import page


def test_the_page_shows_the_stored_counts() -> None:
    text = page.PAGE.read_text()
    record = json.loads(page.RECORD.read_text())
    assert page.with_counts(text, record) == text, "run make faults-page"


def test_other_counts_change_the_page() -> None:
    record = json.loads(page.RECORD.read_text())
    record["kinds"] += 1
    assert page.with_counts(page.PAGE.read_text(), record) != page.PAGE.read_text()
