"""Writes the tables of docs/bench.md from the stored runs.

Usage: python -m torchrun_bench.page
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchrun_bench.api_requests import writes
from torchrun_bench.competitors import COMPETITORS, CONTROLLER, Competitor
from torchrun_bench.results import Results, Run, stored
from torchrun_bench.shapes import TARGET_NODES, ratio
from torchrun_bench.spread import spread, table
from torchrun_bench.turns import Turn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bench.md"
BEGIN, END = "<!-- figures: make bench -->", "<!-- end of figures: make bench -->"
RUNS = 3  # the newest runs of a part make its table
COLUMNS: tuple[tuple[str, Callable[[Turn], float]], ...] = (
    ("idle p50, ms", lambda turn: turn.p50),
    ("idle p99, ms", lambda turn: turn.p99),
    ("child Jobs a second", lambda turn: turn.rate),
    ("CPU a job, ms", lambda turn: turn.cpu_ms),
    ("API server's CPU a job, ms", lambda turn: turn.api_cpu_ms),
    ("peak MiB", lambda turn: turn.peak_mib),
    ("writes a job", lambda turn: writes(turn.requests)),
)
RATIOS = (
    ("idle p50", "p50"),
    ("idle p99", "p99"),
    ("child Jobs a second", "rate"),
    ("CPU a job", "cpu_ms"),
    ("peak MiB", "peak_mib"),
)


def shapes(results: Results) -> str:
    """The tables of the part `shapes`: each size, requests, ratios and the restart."""
    turns = results.turns
    blocks = [_size(turns, nodes) for nodes in dict.fromkeys(each.nodes for each in turns)]
    blocks += [_ratios(turns), _requests(turns), _restarts(results)]
    return "\n".join(block for block in blocks if block)


def _present(turns: Sequence[Turn]) -> list[Competitor]:
    names = {each.competitor for each in turns}
    return [one for one in COMPETITORS if one.name in names]


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|".join("---" for _ in titles)
    cells = [f"| {' | '.join(line)} |" for line in (titles, *lines)]
    return "\n".join([cells[0], f"|{rule}|", *cells[1:], ""])


def _size(turns: Sequence[Turn], nodes: int) -> str:
    mine = [each for each in turns if each.nodes == nodes]
    jobs = f"{mine[0].jobs:,}"
    titles = [f"{nodes} node{'s' * (nodes > 1)}, burst of {jobs}", *(name for name, _ in COLUMNS)]
    lines = []
    for one in _present(mine):
        its = [each for each in mine if each.competitor == one.name]
        lines.append([one.name, *(spread([read(each) for each in its]) for _, read in COLUMNS)])
    return _table(titles, lines)


def _ratios(turns: Sequence[Turn]) -> str:
    lines = []
    for nodes in dict.fromkeys(each.nodes for each in turns):
        for other in _present(turns):
            if other.name == CONTROLLER.name:
                continue
            values = [ratio(turns, field, nodes, other) for _, field in RATIOS]
            cells = ["" if value is None else f"{value:.2f}" for value in values]
            lines.append([f"{nodes}", other.name, *cells])
    return _table(["nodes", "controller relative to", *(name for name, _ in RATIOS)], lines)


def _requests(turns: Sequence[Turn]) -> str:
    """Requests for each job of a burst, by verb and resource: medians over the rounds."""
    mine = [each for each in turns if each.nodes == TARGET_NODES]
    kinds = sorted({kind for each in mine for kind, n in each.requests.items() if n >= 0.005})
    if not kinds:
        return ""
    present = _present(mine)
    lines = []
    for kind in kinds:
        medians = [
            statistics.median(
                each.requests.get(kind, 0.0) for each in mine if each.competitor == one.name
            )
            for one in present
        ]
        lines.append([kind, *(f"{value:.2f}" if value else "" for value in medians)])
    titles = [f"requests a job, {TARGET_NODES} nodes", *(one.name for one in present)]
    return _table(titles, lines)


def _restarts(results: Results) -> str:
    if not results.restarts:
        return ""
    lines = []
    for each in results.restarts:
        kinds = ", ".join(f"{n:.0f} {kind}" for kind, n in each.requests.items())
        lines.append(
            [each.competitor, f"{each.ready:.2f}", f"{each.first_action:.2f}", f"{each.cpu:.2f}",
             f"{each.writes:.0f}", kinds or "none"]
        )  # fmt: skip
    of = f"restart with {results.restarts[0].jobs:,} jobs"
    titles = [of, "ready, s", "first action, s", "CPU, s", "writes", "requests without watches"]
    return _table(titles, lines)


def block(runs: Mapping[str, Run]) -> str:
    """What stands between the two comments of the page."""
    lines = [BEGIN, ""]
    newest = next((name for name in reversed(list(runs)) if runs[name].turns), None)
    if newest is not None:
        run = runs[newest]
        lines += [f"{_about(newest, run)}", "", shapes(run)]
        lines += ["Targets:", "", _of_part(runs, "shapes", 1), ""]
    parts = dict.fromkeys(row.part for run in runs.values() for row in run.rows)
    for part in parts:
        if part not in ("", "shapes"):
            lines += [_of_part(runs, part, RUNS), ""]
    return "\n".join([*lines, END])


def _about(name: str, run: Run) -> str:
    versions = "".join(f", {what} {version}" for what, version in run.versions.items())
    rounds = 1 + max(each.round for each in run.turns)
    return (
        f"`{name}.json`: commit {run.commit}, {run.machine}, Python {run.python}{versions}."
        f" Medians of {rounds} round{'s' * (rounds > 1)}, with minimum and maximum. The load"
        f" average was {run.load[0]:g} at the end, of which the bench itself causes about 3."
    )


def _of_part(runs: Mapping[str, Run], part: str, most: int) -> str:
    """The table of a part over its newest runs, with the names of their files."""
    with_part = {name: [row for row in run.rows if row.part == part] for name, run in runs.items()}
    newest = [name for name, rows in with_part.items() if rows][-most:]
    files = ", ".join(f"`{name}.json`" for name in newest)
    return f"`{part}` ({files}):\n\n{table([with_part[name] for name in newest])}"


def with_figures(text: str, runs: Mapping[str, Run]) -> str:
    """The page with these figures. Raises ValueError without the two comments."""
    before, after = text.index(BEGIN), text.index(END) + len(END)
    return text[:before] + block(runs) + text[after:]


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_figures(PAGE.read_text(), stored()))


if __name__ == "__main__":
    main()
