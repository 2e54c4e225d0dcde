"""A git checkout with a Makefile of short suites, and the program that runs them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everything.suite import Accepted, Suite

TESTS = Path(__file__).parents[2]
# Each suite writes its name to a file, which shows what ran and how often.
MAKEFILE = """
RAN = echo $@ >> ran
good bad: ; @$(RAN) && test $@ = good
fickle: ; @$(RAN) && test -e repaired
variable: ; @$(RAN) && test "$(WORD)" = right && test -z "$(ONLY)$(ARGS)"
slow stubborn: ; @$(RAN) && exec $(PYTHON) $@.py
tested skipping failing silent: ; @$(RAN) && { cp $@.xml "$$TORCHRUN_TEST_JUNIT" || true; }
"""
# Blocked signals, so that none is lost between the line that says "ready" and the wait.
WAITING = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
open("pid", "w").write(f"{os.getpid()}\\n")
signal.sigwait({WANTED})
open("ran", "a").write("ended\\n")
"""
PROGRAMS = {
    "slow.py": WAITING.replace("WANTED", "signal.SIGINT"),
    "stubborn.py": WAITING.replace("WANTED", "signal.SIGTERM"),
}
CASES = {
    "tested": '<testcase classname="t.a" name="one"/>',
    "skipping": '<testcase classname="t.a" name="one"/><testcase classname="t.a" name="two[x]">'
    '<skipped type="pytest.skip" message="no GPU: none of 8"/></testcase>',
    "failing": '<testcase classname="t.a" name="one"><failure message="x"/></testcase>',
}
SUITES = {
    name: Suite(name, f"is {name}", name, pytest=False)
    for name in ("good", "bad", "fickle", "slow", "stubborn")
} | {name: Suite(name, f"is {name}", name) for name in (*CASES, "silent")}
SUITES["variable"] = Suite("variable", "has one", "variable", ("WORD=right",), False)
NO_GPU = Accepted("skip*", "t.a::two*", "no GPU*", "machines without a GPU")
PROGRAM = """
import json, signal, sys
from pathlib import Path
from unit.everything.checkout import SUITES, Accepted
from everything.run import Run
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
names, accepted, again, limit = json.loads(sys.argv[1])
suites = [SUITES[name] for name in names]
run = Run(Path.cwd(), suites, [Accepted(*each) for each in accepted], limit)
sys.exit(run.all(suites, again=again))
"""


@dataclass(frozen=True)
class Checkout:
    """A folder with a commit."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> "Checkout":
        checkout = cls(root)
        (root / "Makefile").write_text(MAKEFILE)
        (root / ".gitignore").write_text("build/\nran\npid\nrepaired\n")
        for name, text in PROGRAMS.items():
            (root / name).write_text(text)
        for name, cases in CASES.items():
            text = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
            (root / f"{name}.xml").write_text(text)
        checkout.git("init", "--quiet")
        checkout.commit()
        return checkout

    def git(self, *arguments: str) -> None:
        subprocess.run(("git", *arguments), cwd=self.root, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", ".")
        who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        self.git(*who, "commit", "--quiet", "--message=change", "--no-verify")

    def start(
        self,
        *names: str,
        accepted: tuple[Accepted, ...] = (),
        again: bool = False,
        limit: float = 60.0,
    ) -> subprocess.Popen[str]:
        """Run these suites, which are all that there are."""
        entries = [[each.suite, each.test, each.reason, each.why] for each in accepted]
        words = json.dumps([names, entries, again, limit])
        return subprocess.Popen(
            (sys.executable, "-c", PROGRAM, words),
            cwd=self.root,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(TESTS),
                "PYTHON": sys.executable,
                "ONLY": "x",
                "MAKEFLAGS": "-- ARGS=y",
            },
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *names: str, **options: Any) -> tuple[int, str]:
        """The exit code and what was printed."""
        process = self.start(*names, **options)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    @property
    def ran(self) -> list[str]:
        """The suites that have run, in order, and what they wrote."""
        file = self.root / "ran"
        return file.read_text().split() if file.exists() else []

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = self.summary["results"]
        return found

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "build/all/summary.json").read_text())
        return found
