"""Scenarios of jobs that save checkpoints, and go on from them."""

from functools import partial

from bodies import Body
from faults.cluster import PODS, index_of
from faults.nodes import End
from faults.simulation import Scenario, Simulation
from torchrun_api import names

SHORT, LONG = 5.0, 13.0  # seconds of a gang without a checkpoint, and with one
# A gang saves more if a fault delays its end. The Jobs and pods have the checkpoints as well.
VARIES = ("attempts", "lastCheckpoint", "earlierCheckpoints", "lastFailure")
ENDED = ("message", "Failed", "workers", "workersStatus", "Scheduled", "unfenced")


async def planned_stops(world: Simulation) -> None:
    """Gangs stop because a machine leaves, by a suspension and by a drain. None may count."""
    world.make_queue()
    world.submit(reliability={"maxRestarts": 0})
    await _saves(world)
    world.nodes.announce_end("node-1")
    await world.reaches("Running", attempt=1, disruptions=1)
    await _saves(world)
    world.edit(suspend=True)
    await world.reaches("Suspended")
    job = world.job()
    assert job is not None
    world.oracle.saves.delete_newest(job["metadata"]["uid"])
    world.edit(suspend=False)
    await world.reaches("Running", attempt=2)
    await _saves(world)
    world.hands.delete(PODS, next(pod for pod in world.workers() if index_of(pod) == "1"))
    await world.reaches("Succeeded", attempt=3, disruptions=2)


async def no_progress(world: Simulation) -> None:
    """Two failures after the last checkpoint end a job. A preemption is not one of them."""
    world.make_queue(quota={"jobs": 1})
    world.submit(reliability={"maxRestarts": 20, "maxAttemptsWithoutProgress": 2})
    await _saves(world)
    world.submit("urgent", priority=10, numNodes=1)
    await world.reaches("Preempted")
    await world.reaches("Succeeded", "urgent")
    await world.reaches("Failed", reason="NoProgress", restarts=2)


async def _saves(world: Simulation) -> None:
    """Wait until the present gang runs, and the status shows a checkpoint of it."""

    def shown() -> bool:
        last, attempt = world.status().get("lastCheckpoint"), world.status().get("attempt", 0)
        return last is not None and world.oracle.saves.by_path[last["path"]].attempt == attempt

    await world.trains()
    await world.until("a checkpoint of the present attempt is shown", shown)


def three_gangs_stay(pod: Body) -> End | None:
    """The first three gangs run until SIGTERM."""
    return None if int(pod["metadata"]["labels"][names.ATTEMPT_LABEL]) < 3 else End(SHORT)


def fails_in_vain(pod: Body) -> End | None:
    """The first gang runs until SIGTERM. The second fails after a checkpoint, the others before."""
    labels = pod["metadata"]["labels"]
    if labels[names.JOB_LABEL] == "urgent":
        return End(SHORT)
    attempt = int(labels[names.ATTEMPT_LABEL])
    if attempt == 0 or index_of(pod) == "0":
        return None
    return End(LONG if attempt == 1 else SHORT, 1, "KeyError: 'x'")


_saving = partial(Scenario, saves=True, renumbered=True)

SCENARIOS = (
    _saving("planned stops", planned_stops, three_gangs_stay, varies=VARIES),
    # The message names the step of the last checkpoint. The pods of the last gang may be gone.
    _saving("no progress", no_progress, fails_in_vain, varies=(*VARIES, *ENDED)),
)
