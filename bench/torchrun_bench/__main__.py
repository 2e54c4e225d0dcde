"""Measures the controller beside bare clients and JobSet, in the same run, on this machine.

Every part prints its progress, then a table: the figures of the controller and of another program,
and their ratio. Only ratios of one run are meaningful, because a busy machine slows down both
sides. The figures are stored as JSON under bench/results.
"""

import argparse
import signal
import sys
from collections.abc import Callable

import msgspec

from torchrun_bench import shapes
from torchrun_bench.churn import churn
from torchrun_bench.cold import cold
from torchrun_bench.competitors import versions
from torchrun_bench.gang_rounds import gang_rounds
from torchrun_bench.large import large
from torchrun_bench.options import QUICK, Options
from torchrun_bench.report import Row, say, table
from torchrun_bench.restarts import restarts
from torchrun_bench.results import Results, save

ABOUT = {
    "shapes": "gangs of 1 to 256 nodes, beside bare clients and JobSet: latency, burst, restart",
    "restart": "first failed pod of a gang to the pods of the next, p50 and p99",
    "cold": "start with 10,000 jobs and 100,000 pods: time to synced, memory, writes",
    "churn": "100,000 pod events through watch, store and queue (needs no API server)",
    "rounds": "restarts in the same pods, launchers alone: messages, bytes, CPU of the leader",
    "large": "one gang of 1,000 and of 5,000 pods, only by name: start, restart, writes, memory",
}
MEASURES: dict[str, Callable[[Options], list[Row]]] = {
    "restart": restarts,
    "cold": cold,
    "churn": churn,
    "rounds": gang_rounds,
    "large": large,
}


def measure(parts: list[str], options: Options) -> Results:
    """Measure these parts in order."""
    results = Results()
    for part in parts:
        if part == "shapes":
            figures = shapes.measure(options)
            results.turns, results.restarts = figures.turns, figures.restarts
            results.versions = versions()
            print(f"\n{shapes.table(figures.turns)}")
            results.rows += _print_rows(part, shapes.rows(figures.restarts))
        else:
            results.rows += _print_rows(part, MEASURES[part](options))
    return results


def _print_rows(part: str, rows: list[Row]) -> list[Row]:
    if rows:
        print(f"\n{part}\n{table(rows)}\n", flush=True)
    return [msgspec.structs.replace(row, part=part) for row in rows]


def _options() -> tuple[list[str], Options, argparse.Namespace]:
    listed = "\n".join(f"  {name:9} {about}" for name, about in ABOUT.items())
    parser = argparse.ArgumentParser(
        "python -m torchrun_bench",
        description=f"{__doc__}\nparts:\n{listed}",
        epilog="examples:\n"
        "  python -m torchrun_bench                               all parts but large\n"
        "  python -m torchrun_bench --part shapes --part churn    two of them\n"
        "  python -m torchrun_bench --quick --part shapes         does it work at all?\n"
        "  python -m torchrun_bench --set events=20000 --part churn\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--part",
        action="append",
        choices=list(ABOUT),
        help="may be repeated; without it: all but large",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SIZE=N",
        help=f"another size: {', '.join(Options.__struct_fields__)} (several: nodes=1,2)",
    )
    parser.add_argument("--no-save", action="store_true", help="keep no file of results")
    arguments = parser.parse_args()
    options = QUICK if arguments.quick else Options()
    overrides = dict(pair.split("=", 1) for pair in arguments.set)
    if unknown := set(overrides) - set(Options.__struct_fields__):
        parser.error(f"no size is called {', '.join(sorted(unknown))}")
    sizes = {name: tuple(text.split(",")) if name in ("nodes", "large") else text
             for name, text in overrides.items()}  # fmt: skip
    parameters = {**msgspec.structs.asdict(options), **sizes}
    try:
        options = msgspec.convert(parameters, Options, strict=False)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    parts = [part for part in ABOUT if part != "large" or arguments.quick]
    return arguments.part or parts, options, arguments


def main() -> int:
    """Measure, print and store."""
    parts, options, arguments = _options()
    # SIGTERM stops the cluster, like any other end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = measure(parts, options)
    if not (arguments.no_save or arguments.quick):
        say(f"kept in {save(results, parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
