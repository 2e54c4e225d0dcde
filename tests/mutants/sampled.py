"""Random mutants: small bugs at random places, each tried by the tests that run its line.

    make mutants-random                              # 300 of them
    make mutants-random MUTANTS=1000 SEED=7
    make mutants-random ARGS="--only store.py --again"

Verdicts are stored in build/mutants/random.json, so that a run with `--minutes` continues where the
previous one stopped, and a run with another seed adds to them. A verdict holds while its file is
unchanged; `--again` tries survivors again. Exit code 1 where fewer than 97 of 100 of all are killed,
without those that change nothing (equivalent.toml), which are not tried.
"""

import argparse
import ast
import hashlib
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from mutants import marking
from mutants.collected import Collected, CollectedRun, Request
from mutants.fork_server import KILLED_BY_COLLECTION, KILLED_BY_TIME, Run, preload
from mutants.marking import Marks, Recorder
from mutants.mutant import CHECKOUT
from mutants.sites import Site, sites
from mutants.targets import TARGETS, Target, copy_packages, origin

LEAST_KILLED = 0.97
KEPT = CHECKOUT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
RECORDING = 1200.0  # seconds that the tests of one target may take
Trial = Run | CollectedRun
# A slow test may fail by chance, so each of its verdicts is confirmed.
SLOW = 0.5


class Judged(Struct, frozen=True):
    """A mutant and the test that killed it; "" for none. `digest`: of its file."""

    site: Site
    digest: str
    killer: str
    seconds: float
    tests: int


class Result(Struct, frozen=True):
    """The result of a run. `score`: without equivalent mutants."""

    seed: int
    mutants: int
    killed: int
    equivalent: int
    score: float
    survivors: tuple[str, ...]
    judged: tuple[Judged, ...]


class Bench:
    """Two copies of the code from the start of the run: one with a bug, one without."""

    def __init__(self, root: Path, snapshot: Path) -> None:
        self.mutated, self.sound = root / "mutated", root / "sound"
        for copy in (self.mutated, self.sound):
            shutil.copytree(snapshot, copy)
        self._collected: dict[tuple[str, Path], Collected] = {}

    def run(self, site: Site, tests: list[str], seconds: float, *, bug: bool) -> Trial:
        """Run tests on a copy. Code outside functions needs a new process."""
        copy = self.mutated if bug else self.sound
        if not site.in_function:
            return Run(copy, tests, 30 + seconds)
        target = next(target for target in TARGETS if site.file in target.sources())
        if (target.name, copy) not in self._collected:
            self._collected[target.name, copy] = Collected(copy, target.test_files())
        mutated = (copy / site.file).read_text() if bug else ""
        request = Request(tuple(tests), 10 + seconds, site.file if bug else "", mutated)
        return self._collected[target.name, copy].run(request)

    def end(self) -> None:
        """End the processes."""
        for process in self._collected.values():
            process.end()

    def plant(self, site: Site) -> None:
        """Write the bug."""
        (self.mutated / site.file).write_text(site.mutate((self.sound / site.file).read_text()))

    def restore(self, site: Site) -> None:
        """Restore the original file."""
        shutil.copyfile(self.sound / site.file, self.mutated / site.file)


class Judge:
    """Tries several mutants at a time. `marks`: which tests run a line."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._sound: set[str] = set()
        self._unsound: set[str] = set()

    def judge(self, site: Site, bench: Bench) -> Generator[Trial, str, Judged]:
        """Try one mutant. Yields runs, and receives the result of each."""
        began = time.monotonic()
        tests = self._tests(site)
        killer = ""
        bench.plant(site)
        try:
            while tests:
                expected = sum(self._marks.seconds[test] for test in tests)
                killer = yield bench.run(site, tests, 4 * expected, bug=True)
                if killer == KILLED_BY_TIME:  # a busy machine may be slow, so a longer run decides
                    killer = yield bench.run(site, tests, 120 + 8 * expected, bug=True)
                if killer in ("", KILLED_BY_TIME, KILLED_BY_COLLECTION):
                    break
                if (yield from self._is_sound(killer, site, bench)):
                    break
                tests = tests[tests.index(killer) + 1 :] if killer in tests else []
                killer = ""
        finally:
            bench.restore(site)
        seconds = time.monotonic() - began
        return Judged(site, digest_of(bench.sound / site.file), killer, seconds, len(tests))

    def _tests(self, site: Site) -> list[str]:
        found = self._marks.covering(site.file, site.statement, in_function=site.in_function)
        if not site.in_function:
            seconds = self._marks.seconds
            naming = [test for test in seconds if names_module(_file_of(test), site.file)]
            naming.sort(key=lambda test: seconds[test])
            found = list(dict.fromkeys([*naming, *found]))
        return [test for test in found if test not in self._unsound]

    def _is_sound(self, test: str, site: Site, bench: Bench) -> Generator[Trial, str, bool]:
        """Whether the test passes without a bug."""
        if test in self._sound and self._marks.seconds.get(test, SLOW) < SLOW:
            return True
        failed = yield bench.run(site, [test], 120, bug=False)
        if not failed:
            self._sound.add(test)
            return True
        self._unsound.add(test)
        print(f"not counted: {test} fails without any bug", flush=True)
        return False


def judged(judge: Judge, chosen: Iterable[Site], benches: list[Bench]) -> Iterator[Judged]:
    """Try the mutants, one on each bench at a time. Yields verdicts in the order of completion."""
    waiting = iter(chosen)
    free = list(benches)
    running: list[tuple[Bench, Generator[Trial, str, Judged], Trial]] = []
    while True:
        while free and (site := next(waiting, None)) is not None:
            bench = free.pop()
            trial = judge.judge(site, bench)
            try:
                running.append((bench, trial, next(trial)))
            except StopIteration as end:
                free.append(bench)
                yield end.value
        if not running:
            return
        for entry in list(running):
            bench, trial, run = entry
            verdict = run.poll()
            if verdict is None:
                continue
            running.remove(entry)
            try:
                running.append((bench, trial, trial.send(verdict)))
            except StopIteration as end:
                free.append(bench)
                yield end.value
        time.sleep(0.005)


@cache
def names_module(test_file: Path, file: str) -> bool:
    """Whether a file of tests imports the module `file` by name."""
    module = file.removesuffix(".py").replace("/", ".")
    for node in ast.walk(ast.parse(test_file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        else:
            continue
        if module in names:
            return True
    return False


def _file_of(test: str) -> Path:
    return CHECKOUT / test.partition("::")[0]


def digest_of(path: Path) -> str:
    """The digest of the content of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@cache
def universe() -> tuple[Site, ...]:
    """All possible mutants."""
    files = [file for target in TARGETS for file in target.sources()]
    return tuple(site for file in files for site in sites(origin(file), file))


def equivalents(path: Path = EQUIVALENT) -> dict[tuple[str, str, str, str], str]:
    """Equivalent mutants by key, with the reason."""
    listed = tomllib.loads(path.read_text()).get("equivalent", [])
    return {(e["file"], e["source"], e["before"], e["after"]): e["reason"] for e in listed}


def record(target: Target, root: Path) -> Marks:
    """Which tests of a target run which line. Cached until code or tests change."""
    saved = KEPT / f"marks-{target.name}-{target.digest()[:16]}.json"
    if saved.exists():
        return msgspec.json.decode(saved.read_bytes(), type=Marks)
    print(f"{target.name}: which test runs which line", flush=True)
    copy = copy_packages(root / f"recording-{target.name}")
    marking.instrument(copy, target.sources())
    run = Run(copy, target.test_files(), RECORDING, [Recorder(copy)])
    failed = run.wait()
    if failed in (KILLED_BY_TIME, KILLED_BY_COLLECTION):
        sys.exit(f"{target.name}: the tests do not run ({failed})\n{run.log[-3000:]}")
    marks = marking.read(copy)
    passed = len(marks.seconds)
    print(
        f"{target.name}: {passed} tests pass, {run.seconds:.0f} s, first failure: {failed or 'none'}"
    )
    KEPT.mkdir(parents=True, exist_ok=True)
    saved.write_bytes(msgspec.json.encode(marks))
    return marks


def _line(
    done: Judged, number: int, total: int, known: dict[tuple[str, str, str, str], str]
) -> str:
    site = done.site
    result = f"killed by {done.killer.rpartition('/')[2][:90]}"
    if not done.killer:
        result = "changes nothing" if site.key in known else f"SURVIVES {done.tests} tests"
    before = " ".join(site.before.split())[:60]
    place = f"{site.file.partition('/')[2]}:{site.line}"
    return (
        f"{number:4}/{total} {done.seconds:5.1f} s  {place} {before!r} -> {site.after!r}: {result}"
    )


def _result(seed: int, done: list[Judged]) -> Result:
    known = equivalents()
    killed = [one for one in done if one.killer]
    alive = [one for one in done if not one.killer]
    equal = [one for one in alive if one.site.key in known]
    counted = len(done) - len(equal)
    texts = sorted(
        f"{one.site.file}:{one.site.line}: {one.site.source!r}: {one.site.before!r} -> {one.site.after!r}"
        for one in alive
        if one not in equal
    )
    score = len(killed) / counted if counted else 1.0
    return Result(
        seed, len(done), len(killed), len(equal), round(score, 4), tuple(texts), tuple(done)
    )


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mutants.sampled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=300, help="how many of all that there are")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="PART", help="of these files alone"
    )
    parser.add_argument("--again", action="store_true", help="try what has survived again")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--record", action="store_true", help="only see which test runs which line")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--json", type=Path, default=KEPT / "random.json", help="where it is kept")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[Site]:
    every = universe()
    drawn = sorted(every, key=lambda site: _draw(options.seed, site))[: options.count]
    return _of_files(drawn, options.only)


def _of_files(chosen: list[Site], parts: list[str]) -> list[Site]:
    """Those whose file contains one of the parts; all without parts."""
    return [site for site in chosen if not parts or any(part in site.file for part in parts)]


def _draw(seed: int, site: Site) -> bytes:
    """A random number. An edit elsewhere does not change it, so later runs try the same mutants."""
    return hashlib.sha256(repr((seed, *site.key)).encode()).digest()


def _load_results(path: Path, *, again: bool) -> dict[Site, Judged]:
    """Verdicts of earlier runs that still hold, of any seed; without survivors for `again`."""
    if not path.exists():
        return {}
    before = msgspec.json.decode(path.read_bytes(), type=Result).judged
    present, known = {*universe()}, equivalents()
    return {
        one.site: one
        for one in before
        if one.site in present
        and one.digest == digest_of(origin(one.site.file))
        and (one.killer or not again or one.site.key in known)
    }


def main(arguments: list[str]) -> int:
    """Run the mutants. Returns the exit code."""
    options = _options(arguments)
    preload()
    chosen = _chosen(options)
    before = _load_results(options.json, again=False)
    known = equivalents()
    verdicts = _load_results(options.json, again=options.again)
    verdicts |= {site: _untried(site) for site in chosen if site.key in known}
    left = [site for site in chosen if site not in verdicts]
    survivors = [site for site in before if site not in verdicts and site not in chosen]
    left += _of_files(survivors, options.only)
    total = len(verdicts) + len(left)
    kinds = ", ".join(
        f"{count} {kind}" for kind, count in sorted(Counter(s.kind for s in left).items())
    )
    print(
        f"{len(chosen)} mutants of seed {options.seed}, {len(left)} to be tried: {kinds}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root, files = Path(folder), {site.file for site in left}
        snapshot = copy_packages(root / "snapshot")
        wanted = [target for target in TARGETS if files & {*target.sources()}]
        judge = Judge(marking.merged([record(target, root) for target in wanted]))
        until = time.monotonic() + 60 * (0 if options.record else options.minutes)
        benches = [Bench(root / str(number), snapshot) for number in range(options.workers)]
        in_time = (site for site in left if time.monotonic() < until)
        for one in judged(judge, in_time, benches):
            verdicts[one.site] = one
            print(_line(one, len(verdicts), total, known), flush=True)
            _write(options, verdicts)
        for bench in benches:
            bench.end()
    result = _write(options, verdicts)
    print("\n".join(["", "survivors:", *result.survivors]))
    stale = known.keys() - {site.key for site in universe()}
    print(
        "".join(f"\nno such mutant any more, see {EQUIVALENT.name}: {key}" for key in sorted(stale))
    )
    print(
        f"\n{result.killed} of {result.mutants - result.equivalent} killed ({result.score:.1%}),"
        f" {result.equivalent} change nothing, {total - result.mutants} not tried yet"
    )
    return 0 if result.score >= LEAST_KILLED else 1


def _untried(site: Site) -> Judged:
    """The verdict on an equivalent mutant. All tests of its line would run, for nothing."""
    return Judged(site, digest_of(origin(site.file)), "", 0.0, 0)


def _write(options: argparse.Namespace, verdicts: dict[Site, Judged]) -> Result:
    """Store all verdicts, also those of other seeds and files."""
    result = _result(options.seed, list(verdicts.values()))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
