"""Whether a failed round is followed by another one in the same pods, or by a new gang. Pure.

The controller knows all rules and counts. It gives the gang what the launchers may decide without
it, so that they can restart while no controller or API server is there. In any doubt the pods end,
and the controller decides.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from ..contract import IN_PLACE_RESTARTS
from ..errors import LaunchError
from ..failure import Cause

# Failures of the training itself. After any other one, such as dead storage, the pod must go.
_IN_PLACE = frozenset({"Exception", "ExitCode", "Signaled", "Hung"})
# Failures of one kind in a row, without a newer step between them, until a new gang is started.
_SAME_KIND = 3
_LASTED_SECONDS = 600.0  # a round without steps that ran for so long has made progress


class RestartLimits(NamedTuple):
    """What the controller permits: restarts, and the exit codes and signals that rules name."""

    restarts: int = 0
    exit_codes: frozenset[int] = frozenset()
    signals: frozenset[int] = frozenset()


def read_limits(text: str) -> RestartLimits:
    """Parse the variable of the controller; no restarts if it is empty. Raises LaunchError."""
    if not text:
        return RestartLimits()
    try:
        body = json.loads(text)
        return RestartLimits(
            int(body["restarts"]), frozenset(body["exitCodes"]), frozenset(body["signals"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            "InvalidSetting",
            f'{IN_PLACE_RESTARTS} is {text!r}. It must be JSON as {{"restarts": 3, "exitCodes": [],'
            ' "signals": []}.',
        ) from error


class _Streak(NamedTuple):
    """The failures of one kind in a row that the ranks were restarted after.

    step: the newest one of all rounds that failed, -1 for none.
    """

    reason: str = ""
    exit_code: int = 0
    failures: int = 0
    step: int = -1


class RestartPolicy:
    """Allows restarts within the limits."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._streak = _Streak()  # of the failures until now

    @property
    def is_off(self) -> bool:
        """Whether no failure is followed by another round."""
        return not self._limits.restarts

    def allows(self, cause: Cause, step: int | None, ran_seconds: float, restarts: int) -> bool:
        """Whether to start another round after this failure. Called once for each failure.

        step: the newest step of the failed round, None without reports. restarts: before this one.
        """
        self._count(cause, step, ran_seconds)
        if cause.reason not in _IN_PLACE or self._streak.failures >= _SAME_KIND:
            return False
        # As the controller does: a shell reports the signal of its program by its exit code.
        signal = cause.signal or (cause.exit_code - 128 if 128 < cause.exit_code < 192 else None)
        if cause.exit_code in self._limits.exit_codes or signal in self._limits.signals:
            return False
        return restarts < self._limits.restarts

    def _count(self, cause: Cause, step: int | None, ran_seconds: float) -> None:
        before = self._streak
        kind = (cause.reason, cause.exit_code)
        has_progress = ran_seconds >= _LASTED_SECONDS if step is None else step > before.step
        is_other = has_progress or kind != (before.reason, before.exit_code)
        newest = before.step if step is None else max(before.step, step)
        self._streak = _Streak(*kind, 1 if is_other else before.failures + 1, newest)
