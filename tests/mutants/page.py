"""The numbers of planted bugs in docs/faults.md, from the stored counts of the last runs.

    make mutants, make mutants-random     write build/mutants/planted.json and random.json
    make mutants-page                     stores their counts, and writes the page

The numbers are between two comments of the page. Everything else is written by hand.
"""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mutants.mutant import CHECKOUT

LATEST = CHECKOUT / "build" / "mutants"
KEPT = CHECKOUT / "bench" / "results" / "mutants.json"
PAGE = CHECKOUT / "docs" / "faults.md"
BEGIN, END = "<!-- scores: written by tests/mutants/page.py -->", "<!-- end of scores -->"
PARTS = {"planted": "`make mutants`", "random": "`make mutants-random`"}
FIELDS = ("mutants", "killed", "equivalent")


def block(counts: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the saved counts."""
    rows = [
        f"| {title} | {part['mutants']:,} | {part['equivalent']:,} | {part['killed']:,}"
        f" | {part['killed'] / (part['mutants'] - part['equivalent']):.1%} | {part['date']} |"
        for name, title in PARTS.items()
        if (part := counts.get(name))
    ]
    head = ("| run | tried | without effect | found | share | date |", "|---|---|---|---|---|---|")
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def with_scores(page: str, counts: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the numbers of the runs. Raises ValueError without the two comments."""
    before, after = page.index(BEGIN), page.index(END) + len(END)
    return page[:before] + block(counts) + page[after:]


def latest(folder: Path) -> dict[str, dict[str, Any]]:
    """The counts of the last runs, by part; `date` is the day of the end of each."""
    found = {}
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            day = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
            found[name] = {"date": day, **{field: result[field] for field in FIELDS}}
    return found


def main() -> int:
    """Store the counts of the last runs, and write the page."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    counts = kept | latest(LATEST)
    KEPT.write_text(json.dumps(counts, indent=2) + "\n")
    PAGE.write_text(with_scores(PAGE.read_text(), counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
