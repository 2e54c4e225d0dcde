"""Disables each mechanism of admission in turn, and stores the effect.

python -m torchrun_bench.admission            run, store the figures, write the page
python -m torchrun_bench.admission --page     write the page from the stored figures
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from msgspec.structs import asdict

from torchrun_bench.admission.measure import Figures, measure
from torchrun_bench.admission.traces import TRACES
from torchrun_bench.admission.variants import SPREAD, VARIANTS
from torchrun_bench.report import RESULTS, say

FIGURES = RESULTS / "admission.json"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "bench.md"
BEGIN, END = "<!-- figures: make admission-bench -->", "<!-- end of figures -->"
# A title, the field of Figures, its factor, and the format of the figure.
COLUMNS = (
    ("utilization", "utilisation", 100, "{:.1f}"),
    ("fairness", "fairness", 100, "{:.1f}"),
    ("largest gangs started", "large_started", 100, "{:.0f} %"),
    ("their mean wait", "large_mean_wait", 1, "{:.1f} h"),
    ("mean wait of all", "mean_wait", 1, "{:.1f} h"),
)
POINTS = ("utilisation", "fairness")


def run(seeds: int, jobs: int) -> dict[str, object]:
    """Figures by trace and variant: for each field its value with each seed."""
    traces: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, make in TRACES.items():
        runs = [make(seed, jobs) for seed in range(1, seeds + 1)]
        for variant, decide in VARIANTS.items():
            figures = [measure(trace, decide, spread=variant == SPREAD) for trace in runs]
            fields = {
                field: [round(asdict(one)[field], 4) for one in figures]
                for field in Figures.__struct_fields__
            }
            traces.setdefault(name, {})[variant] = fields
            means = " ".join(f"{f}={statistics.mean(v):.3f}" for f, v in fields.items())
            say(f"{name} {variant}: {means}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"commit": commit, "seeds": seeds, "jobs": jobs, "traces": traces}


def block(figures: dict[str, object]) -> str:
    """The tables of the stored figures: one for each trace, with means over the seeds.

    Utilisation and fairness of a variant are differences from the full coordinator, in points, with
    their standard error.
    """
    lines = [BEGIN, "", f"{figures['seeds']} seeds of {figures['jobs']} jobs for each trace.", ""]
    traces = figures["traces"]
    assert isinstance(traces, dict)
    for name, variants in traces.items():
        titles = " | ".join(title for title, *_ in COLUMNS)
        lines += [f"| {name}: without | {titles} |", "|---" * (len(COLUMNS) + 1) + "|"]
        whole = variants["nothing"]
        for variant, fields in variants.items():
            cells = [
                _points(fields[field], whole[field])
                if field in POINTS and variant != "nothing"
                else text.format(statistics.mean(fields[field]) * factor)
                for _, field, factor, text in COLUMNS
            ]
            lines.append(f"| {variant} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([*lines, END])


def _points(values: list[float], whole: list[float]) -> str:
    """Paired by seed: the mean difference and its standard error, in points."""
    differences = [100 * (one - all_of_it) for one, all_of_it in zip(values, whole, strict=True)]
    if not any(differences):
        return "0"
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(differences):+.1f} ± {error:.1f}"


def with_figures(page: str, figures: dict[str, object]) -> str:
    """The page with these figures. Raises ValueError without the two comments."""
    before, after = page.index(BEGIN), page.index(END) + len(END)
    return page[:before] + block(figures) + page[after:]


def main() -> int:
    """Run and store the figures, unless only the page is requested. Then write the page."""
    parser = argparse.ArgumentParser("python -m torchrun_bench.admission", description=__doc__)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=600, help="of each trace")
    arguments = parser.parse_args()
    if not arguments.page:
        FIGURES.write_text(json.dumps(run(arguments.seeds, arguments.jobs), indent=1) + "\n")
    PAGE.write_text(with_figures(PAGE.read_text(), json.loads(FIGURES.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
