"""Plants bugs in a copy of the code, one at a time, and checks whether tests detect them.

    make mutants                                     # all of them
    make mutants ONLY="410-is-ignored the-gate-is-open"

Exit code 1 where more than one in twenty survives, or one no longer applies.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from mutants.mutant import CHECKOUT, Mutant
from mutants.table import MUTANTS
from mutants.trial import Copy, Verdict, judge

LEAST_KILLED = 0.95
RESULT = CHECKOUT / "build" / "mutants" / "planted.json"


def main(arguments: list[str]) -> int:
    """Run the mutants. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="NAME", nargs="*", help="these and no others")
    parser.add_argument("--list", action="store_true", help="name them, and what harm they do")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    unknown = set(options.only or ()) - {mutant.name for mutant in chosen}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}; see --list")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:40} {mutant.package + '/' + mutant.file:56} {mutant.harm}")
        return 0
    for mutant in chosen:  # before the slow part
        mutant.mutated()
    with tempfile.TemporaryDirectory(prefix="mutants-") as root:
        return _report(_run(Copy(Path(root)), chosen))


def _run(copy: Copy, mutants: list[Mutant]) -> dict[Mutant, Verdict]:
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    print(f"without a bug: {len(tests)} files and folders of tests", flush=True)
    sound = copy.test(tests)
    if sound.killer:
        sys.exit(f"{sound.killer} fails without any bug, so it cannot judge mutants")
    verdicts: dict[Mutant, Verdict] = {}
    for number, mutant in enumerate(mutants, start=1):
        verdicts[mutant] = verdict = judge(copy, mutant)
        result = f"killed by {_short(verdict.killer)}" if verdict.killer else "SURVIVES"
        print(
            f"{number:3}/{len(mutants)} {verdict.seconds:6.1f} s  {mutant.name}: {result}",
            flush=True,
        )
        if len(mutants) == len(MUTANTS):
            _save(verdicts)
    return verdicts


def _short(test: str) -> str:
    return test.removeprefix("tests/").removeprefix("unit/")


def _save(verdicts: dict[Mutant, Verdict]) -> None:
    """Store the counts of a run of all bugs so far, for docs/faults.md."""
    survivors = [mutant.name for mutant, verdict in verdicts.items() if not verdict.killer]
    killed = len(verdicts) - len(survivors)
    counts = {"mutants": len(verdicts), "killed": killed, "equivalent": 0, "survivors": survivors}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(counts, indent=2) + "\n")


def _report(verdicts: dict[Mutant, Verdict]) -> int:
    """Print a Markdown table of the bugs and the tests that found them."""
    print("\n| bug | what a user would see | found by | s |\n|---|---|---|---|")
    for mutant, verdict in verdicts.items():
        killer = f"`{_short(verdict.killer)}`" if verdict.killer else "**nothing**"
        print(f"| {mutant.name} | {mutant.harm} | {killer} | {verdict.seconds:.0f} |")
    killed = sum(bool(verdict.killer) for verdict in verdicts.values())
    seconds = sum(verdict.seconds for verdict in verdicts.values())
    share = killed / len(verdicts)
    print(f"\n{killed} of {len(verdicts)} killed ({share:.0%}), {seconds / 60:.1f} min")
    return 0 if share >= LEAST_KILLED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
