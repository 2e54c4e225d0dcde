"""The scores of planted bugs in docs/faults.md are those of the stored runs."""

import json
from pathlib import Path

import pytest

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


def test_the_latest_runs_are_stored_with_their_survivors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("code.py", "a = 1", "1", "2"), ("code.py", "b = 1", "1", "2"), ("x.py", "c", "c", "d")
    places = [dict(zip(page.PLACE, text, strict=True)) for text in texts]
    monkeypatch.setattr(page, "equivalents", lambda: {texts[0]: "never read"})
    judged = [{"site": place | {"line": 7}, "killer": ""} for place in places[:2]]
    judged.append({"site": places[2], "killer": "test_c"})
    counts = {"mutants": 3, "killed": 1, "equivalent": 1}
    (tmp_path / "random.json").write_text(json.dumps({**counts, "seed": 7, "judged": judged}))
    (tmp_path / "planted.json").write_text(json.dumps({**counts, "survivors": ["a-bug"]}))
    stored = page.latest(tmp_path)
    assert stored["random"].pop("date").count("-") == 2
    alive = [{**places[1], "verdict": ""}, {**places[0], "verdict": "never read"}]
    assert stored["random"] == {**counts, "survivors": alive}
    assert stored["planted"]["survivors"] == ["a-bug"]
