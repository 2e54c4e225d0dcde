"""Measures the controller beside bare clients and JobSet, in the same run, on this machine.

Every part prints its progress, then a table: the figures of the controller and of another program,
their ratio, and the target, if any. Only ratios of one run are meaningful, because a busy machine
slows down both sides. The figures are stored as JSON under bench/results.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from torchrun_bench import page
from torchrun_bench.competitors import versions
from torchrun_bench.options import QUICK, Options
from torchrun_bench.report import Row, say, table
from torchrun_bench.results import Results, save

ABOUT = {
    "shapes": "gangs of 1 to 256 nodes, beside bare clients and JobSet: latency, burst, restart",
    "writes": "one write at a time: latency and the API server's CPU of each kind",
    "steady": "a minute with 1,000 and 10,000 running jobs and nothing to do: writes, CPU",
    "cold": "start with 10,000 jobs and 100,000 pods: time to synced, memory, writes",
    "hour": "an hour of 50 pod events a second beside 100,000 pods: CPU, growth of memory",
    "churn": "100,000 pod events through watch, store and queue (needs no API server)",
    "restart": "first failed pod of a gang to the pods of the next, p50 and p99",
    "growth": "latency and cold start at 1x, 10x, 100x: the exponents",
    "large": "one gang of 1,000 and of 5,000 pods: start, restart, writes, status, memory",
    "life": "writes of a job from its creation to its success",
    "resume": "process start to the Job of a job that waits, among 1,000 others",
    "planted": "that a planted slow-down of 2x shows in burst and churn: tests the bench itself",
}
STANDING = ("steady", "cold", "hour", "growth")  # share a cluster
ON_REQUEST = ("hour", "large", "planted")
# The parts of `make bench`.
USUAL = tuple(part for part in ABOUT if part not in ON_REQUEST)


def _measures() -> dict[str, Callable[[Options], list[Row]]]:
    from torchrun_bench.churn import churn
    from torchrun_bench.large import large
    from torchrun_bench.proof import planted
    from torchrun_bench.restarts import lives, restarts
    from torchrun_bench.single_writes import single_writes
    from torchrun_bench.standing import resume

    return {
        "writes": single_writes,
        "churn": churn,
        "restart": restarts,
        "large": large,
        "life": lives,
        "resume": resume,
        "planted": planted,
    }


def measure(parts: list[str], options: Options) -> Results:
    """Measure these parts in order."""
    from torchrun_bench import shapes, standing

    results = Results()
    shared = [part for part in parts if part in STANDING]
    measures = _measures()
    for part in [part for part in parts if part not in STANDING]:
        if part == "shapes":
            figures = shapes.measure(options)
            results.turns, results.restarts = figures.turns, figures.restarts
            results.versions = versions()
            print(f"\n{page.shapes(results)}")
            results.rows += _print_rows(part, shapes.rows(figures))
        else:
            results.rows += _print_rows(part, measures[part](options))
    if shared:
        results.rows += _print_rows(", ".join(shared), standing.parts(shared, options))
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
        "  python -m torchrun_bench                               all usual parts\n"
        "  python -m torchrun_bench --part shapes --part churn    two of them\n"
        "  python -m torchrun_bench --quick --part shapes         does it work at all?\n"
        "  python -m torchrun_bench --set events=20000 --part churn\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--part",
        action="append",
        choices=list(ABOUT),
        help=f"may be repeated; without it: {', '.join(USUAL)}",
    )
    parser.add_argument("--quick", action="store_true", help="smoke sizes, without targets")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SIZE=N",
        help=f"another size: {', '.join(Options.__struct_fields__)} (several: nodes=1,2)",
    )
    parser.add_argument(
        "--plant",
        type=float,
        default=0.0,
        metavar="FACTOR",
        help="slow the controller down by this factor, without uvloop; compare with --plant 1",
    )
    parser.add_argument("--no-save", action="store_true", help="keep no file of results")
    arguments = parser.parse_args()
    options = QUICK if arguments.quick else Options()
    overrides = dict(pair.split("=", 1) for pair in arguments.set)
    if unknown := set(overrides) - set(Options.__struct_fields__):
        parser.error(f"no size is called {', '.join(sorted(unknown))}")
    sizes = {name: tuple(text.split(",")) if name in ("scales", "nodes", "large") else text
             for name, text in overrides.items()}  # fmt: skip
    parameters = {**msgspec.structs.asdict(options), **sizes, "plant": arguments.plant}
    try:
        options = msgspec.convert(parameters, Options, strict=False)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    # The smoke run is of everything.
    usual = USUAL if not arguments.quick else (*USUAL, "hour", "large")
    return arguments.part or list(usual), options, arguments


def main() -> int:
    """Measure, print and store. The exit code is 0 if every target was met."""
    parts, options, arguments = _options()
    if arguments.quick:
        os.environ["TORCHRUN_BENCH_QUICK"] = "1"
    # SIGTERM stops the cluster, like any other end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = measure(parts, options)
    missed = [row.what for row in results.rows if not row.met]
    for what in missed:
        say(f"misses its target: {what}")
    if results.rows and not (arguments.no_save or arguments.quick or arguments.plant):
        say(f"kept in {save(results, parts)}")
        page.main()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
