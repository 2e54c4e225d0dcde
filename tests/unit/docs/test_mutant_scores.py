"""The scores of planted bugs in docs/faults.md are those of the stored runs."""

import json
from pathlib import Path

from mutants import page


def test_the_page_shows_the_stored_scores() -> None:
    text = page.PAGE.read_text()
    assert page.with_scores(text, json.loads(page.KEPT.read_text())) == text, (
        "run make mutants-page"
    )


def test_mutants_without_effect_do_not_count() -> None:
    part = {"date": "2026-01-02", "mutants": 1010, "killed": 975, "equivalent": 10}
    text = page.block({"random": part})
    assert "| 1,010 | 10 | 975 | 97.5% | 2026-01-02 |" in text
    assert "`make mutants` " not in text


def test_the_latest_runs_are_stored(tmp_path: Path) -> None:
    result = {"seed": 7, "mutants": 3, "killed": 2, "equivalent": 1, "survivors": ["x"]}
    (tmp_path / "random.json").write_text(json.dumps(result))
    (part,) = page.latest(tmp_path).values()
    assert part.pop("date").count("-") == 2
    assert part == {"mutants": 3, "killed": 2, "equivalent": 1}
