"""Runs with faults, each compared with the same scenario without faults.

    python -m faults.campaign restart "write PATCH jobs/train-r1 #1" dropped

with `tests` on the path plays one of them and prints its trace (see CONTRIBUTING.md).
"""

import functools
import random
import sys
from collections.abc import Iterator, Mapping

import structlog
from msgspec import Struct

from faults.faults import CLOCKS, LASTING, OF_EVENTS, OF_REQUESTS, Planned, Point
from faults.oracle import differences
from faults.scenarios import SCENARIOS
from faults.simulation import Outcome, simulate

# Recurring requests: the lease, discovery, and new watches.
_RECURRING = ("lease ", "event MODIFIED leases", "watch GET /apis", "watch WATCH")
RECURRENCES = 1
# Retries of a failing key within half a minute: after 5 ms, with growing delays.
LADDER = 13
KEYS = 4  # that fail at the same time during a lasting fault, or all objects of the end state
STRIDE = 5
SELDOM = (*LASTING, *CLOCKS, "401", "503")
# Where end states have the cause of a failure.
_CAUSE_PATHS = (
    "torchrun.ai/cause",
    ".status.lastFailure",
    *(f".status.attempts[0].{field}" for field in ("message", "node", "reason")),
)
KINDS = (*OF_REQUESTS, *LASTING, *CLOCKS, *OF_EVENTS)


class Trial(Struct, frozen=True):
    """A scenario with faults."""

    scenario: str
    planned: tuple[tuple[Point, str], ...]

    def __str__(self) -> str:
        return f"{self.scenario}: " + " and ".join(f"{kind} at {p}" for p, kind in self.planned)


@functools.cache
def without_faults(scenario: str) -> Outcome:
    """The outcome without faults."""
    return simulate(SCENARIOS[scenario])


def points(scenario: str) -> list[Point]:
    """The points for faults in a scenario."""
    met = without_faults(scenario).points
    return [p for p in met if p.number <= RECURRENCES or not p.what.startswith(_RECURRING)]


def kinds_at(point: Point) -> Mapping[str, object]:
    """The faults for a point."""
    return OF_EVENTS if point.is_event else {**OF_REQUESTS, **LASTING, **CLOCKS}


def singles(scenario: str, kind: str) -> Iterator[Trial]:
    """One fault of this kind at each point; for similar kinds, at every fifth point."""
    there = [point for point in points(scenario) if kind in kinds_at(point)]
    if kind in SELDOM:
        there = there[SELDOM.index(kind) % STRIDE :: STRIDE]
    for point in there:
        yield Trial(scenario, ((point, kind),))


def pair(scenario: str, chance: random.Random) -> Trial:
    """A trial with two faults at two points."""
    first, second = chance.sample(points(scenario), 2)
    return Trial(
        scenario, tuple((at, chance.choice(sorted(kinds_at(at)))) for at in (first, second))
    )


def shrunk(trial: Trial) -> Trial:
    """A trial with one of the faults, if that alone fails."""
    alone = (Trial(trial.scenario, (fault,)) for fault in trial.planned)
    return next((each for each in alone if judge(each)), trial)


def _shows_the_cause(difference: str) -> bool:
    """Whether only the recorded cause of a failure differs, or a failed pod is gone.

    The Job may be seen to have failed before its pods. Then the controller waits for the pods, whose
    ends show the cause. With a clock that is off it cannot tell how long it has waited: it records
    the reason of the Job, and deletes the pods that still run as far as it knows.
    """
    path, _, values = difference.partition(": ")
    is_pod_without_job = path.startswith(".pods/") and values.endswith("None with it")
    return is_pod_without_job or any(part in path for part in _CAUSE_PATHS)


def judge(trial: Trial) -> list[str]:
    """Play a trial. Returns all violations."""
    kinds = [kind for _, kind in trial.planned]
    usual = without_faults(trial.scenario)
    outcome = simulate(SCENARIOS[trial.scenario], dict(trial.planned), usual.state)
    wrong = [*outcome.wrong, *differences(usual.state, outcome.state)]
    lasting = sum(kind in LASTING for kind in kinds)
    if lasting or len(kinds) > 1:  # the lease may be lost, which must end the process
        wrong = [each for each in wrong if "NotLeader" not in each]
    if any(kind in CLOCKS for kind in kinds) and any(kind in OF_EVENTS for kind in kinds):
        wrong = [each for each in wrong if not _shows_the_cause(each)]
    if not outcome.struck:
        wrong.append("no fault struck")
    faults = len(kinds)
    if outcome.writes > (1 + faults) * usual.writes:
        wrong.append(f"{outcome.writes} writes in the place of {usual.writes}")
    keys = max(KEYS, sum(name.startswith("torchrun") for name in usual.state))
    if outcome.sent > (1 + faults) * usual.sent + faults * LADDER + lasting * keys * LADDER:
        wrong.append(f"{outcome.sent} requests to write in the place of {usual.sent}")
    return wrong


def main(scenario: str, point: str, kind: str) -> int:
    """Play one fault and print its trace."""
    what, _, number = point.rpartition(" #")
    planned: Planned = {Point(what, int(number)): kind}
    usual = without_faults(scenario)
    outcome = simulate(SCENARIOS[scenario], planned, usual.state, trace=print)
    wrong = judge(Trial(scenario, tuple(planned.items())))
    print(*outcome.struck, *(f"WRONG: {each}" for each in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    structlog.reset_defaults()
    sys.exit(main(*sys.argv[1:]))
