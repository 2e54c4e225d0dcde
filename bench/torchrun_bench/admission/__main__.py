"""Replays the traces through the coordinator, and prints what it makes of the cluster.

python -m torchrun_bench.admission [--seeds N] [--jobs N]
"""

import argparse
import statistics
import sys

from msgspec.structs import asdict

from torchrun_bench.admission.measure import measure
from torchrun_bench.admission.traces import TRACES

# A title, the field of Figures, its factor, and the format of the figure.
COLUMNS = (
    ("utilization", "utilisation", 100, "{:.1f}"),
    ("fairness", "fairness", 100, "{:.1f}"),
    ("largest gangs started", "large_started", 100, "{:.0f} %"),
    ("their mean wait", "large_mean_wait", 1, "{:.1f} h"),
    ("mean wait of all", "mean_wait", 1, "{:.1f} h"),
)


def table(seeds: int, jobs: int) -> str:
    """Return a row of figures for each trace, each a mean over the seeds."""
    lines = [
        f"| trace | {' | '.join(title for title, *_ in COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, make in TRACES.items():
        runs = [asdict(measure(make(seed, jobs))) for seed in range(1, seeds + 1)]
        cells = [
            text.format(statistics.mean(run[field] for run in runs) * factor)
            for _, field, factor, text in COLUMNS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m torchrun_bench.admission", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=600, help="of each trace")
    arguments = parser.parse_args()
    sys.stdout.write(table(arguments.seeds, arguments.jobs) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
