"""Time travel: a process dies, and the next one is answered by an API server that lives in the past.

Every list and watch of the new process, the lease apart, begins so many changes back and hears of
everything later only after a while. Writes go to the present.
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
from faults.simulation import Outcome, Simulation, quiet

# How many changes back, and for how many seconds.
LAGS = ((1, 3.0), (10, 3.0), (10, 30.0), (40, 30.0), (10, 100.0))
_NOT_STRUCK = ("lease ", "watch ")


class Journey(Struct, frozen=True):
    """After which request of a scenario, and how far back."""

    scenario: str
    point: Point
    changes: int
    seconds: float

    def __str__(self) -> str:
        back = f"{self.changes} changes back for {self.seconds:.0f} s"
        return f"{self.scenario}: {back}, after a crash at {self.point}"


# What went wrong once, and has a defect of the controller behind it.
REGRESSIONS = (
    # The serve pod of a gang without a status was replaced as if its workers mounted the PVC.
    Journey("direct", Point("write PATCH jobs/train", 1), 10, 3.0),
)


class TravelPlan(FaultPlan):
    """A crash after the request is carried out, and then the past."""

    def __init__(self, journey: Journey) -> None:
        super().__init__({journey.point: "crash-after-commit"})
        self._journey = journey
        self._past: int | None = None
        self._served: set[str] = set()

    def request(self, call: Call) -> RequestFault:
        fault = super().request(call)
        return Depart(self) if fault is not NO_REQUEST_FAULT else fault

    def depart(self, version: int) -> None:
        """From now on new lists and watches begin in the past."""
        self._past = max(1, version - self._journey.changes)
        self._served.clear()

    def as_of(self, call: Call) -> tuple[int, float] | None:
        if self._past is None or call.path in self._served or "/leases" in call.path:
            return None
        if call.method != "GET":  # the same server is watched after it was listed
            self._served.add(call.path)
        return self._past, self._journey.seconds


class Depart(CrashAfterCommit):
    """The process dies, and time travels with its successor."""

    def __init__(self, plan: TravelPlan) -> None:
        self._plan = plan

    async def carried_out(self, call: Call) -> None:
        self._plan.depart(call.client.server.store.version)
        await super().carried_out(call)


def journeys(count: int, seed: str) -> list[Journey]:
    """Drawn at random, without any twice."""
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

    with quiet():
        return virtual_time.run(play())


def judge(journey: Journey) -> list[str]:
    """Everything that is wrong with it, nothing if nothing is."""
    found = travel(journey)
    wrong = [*found.wrong, *differences(without_faults(journey.scenario).state, found.state)]
    if not found.struck:
        wrong.append("no fault struck")
    return wrong
