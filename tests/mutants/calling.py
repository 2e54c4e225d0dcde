"""Bugs in the SDK."""

from functools import partial

from mutants.mutant import Mutant

SDK = partial(Mutant, package="torchrun_sdk")
_TESTS = "tests/unit/sdk"
SERIALIZATION = (f"{_TESTS}/test_serialization.py",)
CALL_STATE = (f"{_TESTS}/test_call_state.py",)

CALLING = (
    SDK(
        "any-format-is-unpacked",
        "serialization.py",
        "if packed.format not in formats or packed.format not in FORMATS:",
        "if packed.format not in FORMATS:",
        "a pod runs code on the laptop of a caller who asked for JSON",
        SERIALIZATION,
    ),
    SDK(
        "pickles-of-another-python",
        "serialization.py",
        "if packed.python != here():",
        "if not packed.python:",
        "a result of another Python is a crash without a hint",
        SERIALIZATION,
    ),
    SDK(
        "json-that-changes-a-value",
        "serialization.py",
        "if not _same(json.loads(data), value):",
        "if False:",
        "a tuple comes back as a list, and keys as text, without a word",
        SERIALIZATION,
    ),
    SDK(
        "results-of-an-earlier-attempt-count",
        "call_state.py",
        "if attempt != self.attempt:\n            return",
        "pass",
        "a call returns what a gang left that was started again",
        CALL_STATE,
    ),
    SDK(
        "half-the-results-are-all",
        "call_state.py",
        "if world and len(self._results) == world and self._done_at is None:",
        "if world and self._results and self._done_at is None:",
        "a call returns before its last rank has",
        CALL_STATE,
    ),
    SDK(
        "the-first-heard-is-the-cause",
        "call_state.py",
        "first = min(self._raised.values(), key=self._order)",
        "first = next(iter(self._raised.values()))",
        "the exception of a victim comes home, and not the cause",
        CALL_STATE,
    ),
    SDK(
        "a-call-has-no-limit",
        "call_state.py",
        "elif limits.call is not None:",
        "elif limits.call is None and limits.quorum < 0:",
        "options(timeout=) is ignored",
        CALL_STATE,
    ),
    SDK(
        "no-launch-timeout",
        "call_state.py",
        "return error if remaining <= 0 else Wait(remaining)",
        "return Wait(max(remaining, 1.0))",
        "a call for which there is no room never comes back",
        CALL_STATE,
    ),
)
