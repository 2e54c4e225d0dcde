"""Time travel: a process dies, and the next one reads from a stale API server.

Every list and watch of the caches of the new process starts some changes in the past, and receives
later changes after a delay. Writes and reads past the caches are of the current state: an API server
answers a list without a resourceVersion from a quorum of etcd.
Source: Sun et al., "Automatic Reliability Testing for Cluster Management Controllers", OSDI 2022.
"""

import random

from msgspec import Struct

import virtual_time
from faults.campaign import points, without_faults
from faults.faults import NO_REQUEST_FAULT, CrashAfterCommit, FaultPlan, Point
from faults.network import Call, RequestFault
from faults.oracle import differences
from faults.scenarios import SCENARIOS, SOUND
from faults.simulation import Outcome, Simulation
from faults.surroundings import surroundings

# The number of changes in the past, and the delay in seconds.
LAGS = ((1, 3.0), (10, 3.0), (10, 30.0), (40, 30.0), (10, 100.0))
_NOT_STRUCK = ("lease ", "watch ")


class Journey(Struct, frozen=True):
    """The request of a scenario before the crash, and the distance in changes."""

    scenario: str
    point: Point
    changes: int
    seconds: float

    def __str__(self) -> str:
        back = f"{self.changes} changes back for {self.seconds:.0f} s"
        return f"{self.scenario}: {back}, after a crash at {self.point}"


# Journeys that found bugs of the controller.
REGRESSIONS = (
    # The serve pod of a gang without a status was replaced as if its workers mounted the PVC.
    Journey("direct", Point("write PATCH jobs/train", 1), 10, 3.0),
)


class TravelPlan(FaultPlan):
    """A crash after the request was processed, and then stale reads."""

    def __init__(self, journey: Journey) -> None:
        super().__init__({journey.point: "crash-after-commit"})
        self._journey = journey
        self._past: int | None = None
        self._served: set[str] = set()

    def request(self, call: Call) -> RequestFault:
        fault = super().request(call)
        return Depart(self) if fault is not NO_REQUEST_FAULT else fault

    def depart(self, version: int) -> None:
        """From now on new lists and watches start in the past."""
        self._past = max(1, version - self._journey.changes)
        self._served.clear()

    def as_of(self, call: Call) -> tuple[int, float] | None:
        if self._past is None or call.session != "watch" or call.path in self._served:
            return None
        if call.method != "GET":  # a watch uses the server of its list
            self._served.add(call.path)
        return self._past, self._journey.seconds


class Depart(CrashAfterCommit):
    """The process dies, and the next one reads from the past."""

    def __init__(self, plan: TravelPlan) -> None:
        self._plan = plan

    async def carried_out(self, call: Call) -> None:
        self._plan.depart(call.client.server.store.version)
        await super().carried_out(call)


def journeys(count: int, seed: str) -> list[Journey]:
    """Draw random journeys without repetitions."""
    everywhere = [
        Journey(name, point, *lag)
        for name in sorted(SOUND)
        for point in points(name)
        if not point.is_event and not point.what.startswith(_NOT_STRUCK)
        for lag in LAGS
    ]
    return random.Random(seed).sample(everywhere, min(count, len(everywhere)))


def travel(journey: Journey) -> Outcome:
    """Play it."""
    wanted = without_faults(journey.scenario).state

    async def play() -> Outcome:
        scenario = SCENARIOS[journey.scenario]
        simulation = Simulation(scenario, TravelPlan(journey), wanted)
        await simulation.run()
        return simulation.outcome()

    with surroundings():
        return virtual_time.run(play())


def judge(journey: Journey) -> list[str]:
    """All violations of the run."""
    problems = travel(journey)
    wrong = [
        *problems.wrong,
        *differences(without_faults(journey.scenario).state, problems.state),
    ]
    if not problems.struck:
        wrong.append("no fault struck")
    return wrong
