"""Failures that restarts do not fix: attempts that end early with the same exception.

The source is `status.attempts`, with the root cause of each ended attempt.
"""

import re
from itertools import pairwise
from typing import NamedTuple

from kubectl_torchrun.cluster.slices import AttemptSlice, JobSlice

ATTEMPTS = 3
SECONDS = 60  # maximum run time of an attempt that counts
_EXCEPTION = "Exception"  # the reason of a root cause with a traceback
_POD = re.compile(r"^Pod \S+: ")
_FACTS = re.compile(r" \([^()]*(?:rank|machine|exit code) [^()]*\)\.?$")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class RepeatedFailure(NamedTuple):
    """The exception that ended the last attempts, such as `ValueError: bad batch`."""

    exception: str

    def describe(self) -> str:
        """A sentence for the user, and what to do."""
        return (
            f"The last {ATTEMPTS} attempts failed within a minute with the same exception, before"
            f" the first step: {self.exception}\nThis is an error in the code. Restarts do not"
            " help."
        )


def find_repeated_failure(job: JobSlice) -> RepeatedFailure | None:
    """The exception of the last ATTEMPTS attempts, if they prove an error in the code.

    Each of them, a gang or a round of it, ran for less than SECONDS and reported no step, and no
    other attempt ended in between.
    """
    last = job.status.attempts[-ATTEMPTS:]
    if len(last) < ATTEMPTS or _has_progress(job, last[0]):
        return None
    if any(after.number - before.number > 1 for before, after in pairwise(last)):
        return None
    if any(end.reason != _EXCEPTION or _seconds(job, end) >= SECONDS for end in last):
        return None
    exceptions = [_exception(end.message) for end in last]
    if len({_ADDRESS.sub("0x", exception) for exception in exceptions}) > 1:
        return None
    return RepeatedFailure(exceptions[-1])


def _seconds(job: JobSlice, end: AttemptSlice) -> int:
    """How long the last start of this attempt ran; that of its earlier rounds is not part of it."""
    if end.round is not None:
        return end.running_seconds
    rounds = [e for e in job.status.attempts if e.number == end.number and e.round is not None]
    return end.running_seconds - sum(earlier.running_seconds for earlier in rounds)


def _has_progress(job: JobSlice, first: AttemptSlice) -> bool:
    """Whether this attempt or a later one reported progress, or this is unknown."""
    progress = job.status.progress
    if progress is None:
        return False
    return progress.time is None or first.start_time is None or progress.time >= first.start_time


def _exception(message: str) -> str:
    """The message of an attempt without pod, rank, machine and exit code, which may differ."""
    return _FACTS.sub("", _POD.sub("", message))
