"""Runs every suite, goes on after a failure, and continues where an earlier run has stopped.

    make all                                  # what has not passed on this commit
    make all ONLY="faults matrix-*"           # some of it
    make all ARGS=--list                      # what there is, and how long it takes
    make all ARGS=--again                     # passed suites, too

build/all has summary.json, summary.md, and for each suite its output and its JUnit files. Exit code
0 if all of them have passed on this commit, 130 after Ctrl-C, and 1 otherwise: a skip has to be in
the table of accepted skips (tests/everything/table.py).
"""

import argparse
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from everything.process import INTERRUPTS
from everything.run import Run
from everything.suite import Suite
from everything.table import ACCEPTED, suites

ROOT = Path(__file__).parents[2]


def options(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m everything",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pythons", nargs="*", default=[], help="of the matrix")
    parser.add_argument("--releases", nargs="*", default=[], help="of Kubernetes, of the matrix")
    parser.add_argument("--only", metavar="NAME", nargs="*", help="these and no others; * and ?")
    parser.add_argument("--list", action="store_true", help="name them, with the last times")
    parser.add_argument("--again", action="store_true", help="run passed suites again")
    return parser.parse_args(arguments)


def choose(everything: tuple[Suite, ...], names: list[str] | None) -> list[Suite]:
    """The suites of these names, in their order. Exits for a name without a suite."""
    for name in names or ():
        if not any(fnmatchcase(suite.name, name) for suite in everything):
            sys.exit(f"no suite is called {name}; make all ARGS=--list names them")
    wanted = names or ["*"]
    return [s for s in everything if any(fnmatchcase(s.name, name) for name in wanted)]


def main(arguments: list[str]) -> int:
    """Run the suites. Returns the exit code."""
    chosen = options(arguments)
    everything = suites(chosen.pythons, chosen.releases)
    # Background jobs of a shell ignore SIGINT, and children would inherit that.
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    try:
        run = Run(ROOT, everything, ACCEPTED)
    except subprocess.CalledProcessError as error:
        sys.exit(f"make all needs a git checkout: {error.stderr.strip()}")
    picked = choose(everything, chosen.only)
    return run.show(picked) if chosen.list else run.all(picked, again=chosen.again)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
