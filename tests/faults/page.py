"""The numbers of docs/faults.md, from the stored counts of a run.

    make faults             or a part of it writes build/faults.json
    make faults-page        stores its parts beside earlier ones, and writes the page

The numbers are between two comments of the page. Everything else is written by hand.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LATEST = ROOT / "build" / "faults.json"
RECORD = ROOT / "bench" / "results" / "faults.json"
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- counts: written by tests/faults/page.py -->", "<!-- end of counts -->"
PARTS = {
    "singles": "single faults",
    "pairs": "pairs of faults",
    "histories": "random histories",
    "time travel": "time travel",
}


def block(counts: Any) -> str:
    """The table of the saved counts."""
    parts = counts["parts"]
    rows = [
        f"| {title} | {parts[part]['runs']:,} | {parts[part]['wrong']:,} | {parts[part]['date']} |"
        for part, title in PARTS.items()
        if part in parts
    ]
    return "\n".join(
        [
            BEGIN,
            "",
            f"{counts['scenarios']} scenarios with {counts['points']:,} points for a fault, and"
            f" {counts['kinds']} kinds of faults.",
            "",
            "| test | runs | wrong | date |",
            "|---|---|---|---|",
            *rows,
            "",
            END,
        ]
    )


def with_counts(page: str, counts: Any) -> str:
    """The page with the numbers of a run. Raises ValueError without the two comments."""
    before, after = page.index(BEGIN), page.index(END) + len(END)
    return page[:before] + block(counts) + page[after:]


def main() -> int:
    """Store the parts of the latest run, and write the page."""
    counts = json.loads(RECORD.read_text()) if RECORD.exists() else {"parts": {}}
    if LATEST.exists():
        latest = json.loads(LATEST.read_text())
        del latest["seconds"]  # depends on the machine
        counts |= {**latest, "parts": counts["parts"] | latest["parts"]}
        RECORD.write_text(json.dumps(counts, indent=2) + "\n")
    PAGE.write_text(with_counts(PAGE.read_text(), counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
