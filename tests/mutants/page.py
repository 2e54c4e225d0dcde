"""The numbers of planted bugs in docs/faults.md, from the stored results of the last runs.

    make mutants, make mutants-random     write build/mutants/planted.json and random.json
    make mutants-page                     stores their counts and survivors, and writes the page

The numbers are between two comments of the page. Everything else is written by hand.
"""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mutants.mutant import CHECKOUT
from mutants.sampled import equivalents

LATEST = CHECKOUT / "build" / "mutants"
KEPT = CHECKOUT / "bench" / "results" / "mutants.json"
PAGE = CHECKOUT / "docs" / "faults.md"
BEGIN, END = "<!-- scores: written by tests/mutants/page.py -->", "<!-- end of scores -->"
PARTS = {"planted": "`make mutants`", "random": "`make mutants-random`"}
FIELDS = ("mutants", "killed", "equivalent")
PLACE = ("file", "source", "before", "after")


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
    """The counts and survivors of the last runs, by part; `date` is the day of the end of each."""
    found = {}
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            day = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
            counts = {field: result[field] for field in FIELDS}
            found[name] = {"date": day, **counts, "survivors": survivors(result)}
    return found


def survivors(result: Mapping[str, Any]) -> list[Any]:
    """The bugs that no test has found: names of planted ones, places of random ones.

    `verdict`: why a random one has no effect; "" if it has one.
    """
    if "judged" not in result:
        return list(result["survivors"])
    known, found = equivalents(), []
    for one in result["judged"]:
        site = one["site"]
        if not one["killer"]:
            key = site["file"], site["source"], site["before"], site["after"]
            place = dict(zip(PLACE, key, strict=True))
            found.append({**place, "verdict": known.get(key, "")})
    return sorted(found, key=lambda one: (one["verdict"] != "", *one.values()))


def main() -> int:
    """Store the results of the last runs, and write the page."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    counts = kept | latest(LATEST)
    KEPT.write_text(json.dumps(counts, indent=2) + "\n")
    PAGE.write_text(with_scores(PAGE.read_text(), counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
