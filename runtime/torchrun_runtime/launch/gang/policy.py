"""Whether a failed round is followed by another one in the same pods, or by a new gang. Pure.

The controller knows all rules and counts. It gives the gang what the launchers may decide without
it, so that they can restart while no controller or API server is there. In any doubt the pods end,
and the controller decides.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from ..cause import Cause, LaunchError
from ..contract import IN_PLACE_RESTARTS

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


class Verdict(NamedTuple):
    """Whether another round follows a failed one.

    by_leftovers: the round seems to have failed because of what the round before has left in the
    pods, so the failure before is the cause.
    """

    restart: bool
    by_leftovers: bool = False


class RoundFailure(NamedTuple):
    """A failed round. step: the newest one, None without reports. is_silent: no output, no step."""

    cause: Cause
    seconds: float
    step: int | None = None
    is_silent: bool = False

    @property
    def kind(self) -> tuple[str, int, str]:
        """The way in which it failed. Exceptions of one type are alike, whatever they say."""
        is_exception = self.cause.reason == "Exception"
        name = self.cause.message.partition(":")[0] if is_exception else ""
        return self.cause.reason, self.cause.exit_code, name


class RestartPolicy:
    """Allows restarts within the limits."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._last: RoundFailure | None = None
        self._alike = 0  # failures with one reason and exit code in a row, without a newer step
        self._newest_step = -1  # of all rounds that failed

    @property
    def is_off(self) -> bool:
        """Whether no failure is followed by another round."""
        return not self._limits.restarts

    def judge(self, failed: RoundFailure, restarts: int) -> Verdict:
        """Whether to start another round. Called once for each failure.

        restarts: before this one.
        """
        by_leftovers = self._is_by_leftovers(failed)
        self._count(failed)
        if by_leftovers:
            return Verdict(restart=False, by_leftovers=True)
        cause = failed.cause
        if cause.reason not in _IN_PLACE or self._alike >= _SAME_KIND:
            return Verdict(restart=False)
        # As the controller does: a shell reports the signal of its program by its exit code.
        signal = cause.signal or (cause.exit_code - 128 if 128 < cause.exit_code < 192 else None)
        if cause.exit_code in self._limits.exit_codes or signal in self._limits.signals:
            return Verdict(restart=False)
        return Verdict(restarts < self._limits.restarts)

    def _is_by_leftovers(self, failed: RoundFailure) -> bool:
        """Whether the round failed sooner than the one before and in another way, or silently.

        A round that got further than those before has found nothing in its way.
        """
        last = self._last
        if last is None or (failed.step is not None and failed.step > self._newest_step):
            return False
        is_other = failed.kind != last.kind and failed.seconds < last.seconds
        return is_other or (failed.is_silent and not last.is_silent)

    def _count(self, failed: RoundFailure) -> None:
        step = failed.step
        if step is None:
            has_progress = failed.seconds >= _LASTED_SECONDS
        else:
            has_progress = step > self._newest_step
        is_other = self._last is None or failed.kind[:2] != self._last.kind[:2]
        self._alike = 1 if has_progress or is_other else self._alike + 1
        self._newest_step = max(self._newest_step, -1 if step is None else step)
        self._last = failed
