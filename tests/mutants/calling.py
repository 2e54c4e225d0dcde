"""Bugs in the SDK, between a call and its results."""

from functools import partial

from mutants.mutant import Mutant

SDK = partial(Mutant, package="torchrun_sdk")
_TESTS = "tests/unit/sdk"
VALUES = (f"{_TESTS}/test_values.py",)
VERDICT = (f"{_TESTS}/test_verdict.py",)

CALLING = (
    SDK(
        "any-format-is-unpacked",
        "values.py",
        "if packed.format not in formats or packed.format not in FORMATS:",
        "if packed.format not in FORMATS:",
        "a pod runs code on the laptop of a caller who asked for JSON",
        VALUES,
    ),
    SDK(
        "pickles-of-another-python",
        "values.py",
        "if packed.python != here():",
        "if not packed.python:",
        "a result of another Python is a crash without a hint",
        VALUES,
    ),
    SDK(
        "json-that-changes-a-value",
        "values.py",
        "if not _same(json.loads(data), value):",
        "if False:",
        "a tuple comes back as a list, and keys as text, without a word",
        VALUES,
    ),
    SDK(
        "results-of-an-earlier-attempt-count",
        "verdict.py",
        "if attempt != self.attempt:\n            return",
        "pass",
        "a call returns what a gang left that was started again",
        VERDICT,
    ),
    SDK(
        "half-the-results-are-all",
        "verdict.py",
        "if world and len(self._results) == world and self._done_at is None:",
        "if world and self._results and self._done_at is None:",
        "a call returns before its last rank has",
        VERDICT,
    ),
    SDK(
        "the-first-heard-is-the-cause",
        "verdict.py",
        "first = min(self._raised.values(), key=self._order)",
        "first = next(iter(self._raised.values()))",
        "the exception of a victim comes home, and not the cause",
        VERDICT,
    ),
    SDK(
        "a-call-has-no-limit",
        "verdict.py",
        "elif limits.call is not None:",
        "elif limits.call is None and limits.quorum < 0:",
        "options(timeout=) is ignored",
        VERDICT,
    ),
    SDK(
        "no-launch-timeout",
        "verdict.py",
        "return error if left <= 0 else Wait(left)",
        "return Wait(max(left, 1.0))",
        "a call for which there is no room never comes back",
        VERDICT,
    ),
)
