"""Scenarios of workspaces: environments, serve pods, and code changes of a running job."""

import json

from bodies import Body
from faults.cluster import is_worker
from faults.nodes import End
from faults.scripts import SYNCING, first_gang_fails, well
from faults.simulation import Scenario, Simulation
from torchrun_api import names

ZIP = {"workspace": {"source": "zip", "delivery": "shared"}}
DIRECT = {"workspace": {"source": "zip", "delivery": "direct"}}
OLD, NEW = "a" * 64, "b" * 64
UPLOADED = {names.WORKSPACE_SHA256: OLD}


def prepares(pod: Body) -> End | None:
    """Like `well`. Sync pods report their revision, and keep running if they serve it."""
    meta = pod["metadata"]
    if meta["labels"][names.COMPONENT_LABEL] != names.SYNC:
        return well(pod)
    number = names.number_of(meta["name"])
    sha256 = (OLD, NEW)[min(number, 1)]
    message = {"sha256": sha256, "files": 1, "bytes": 1, "revision": number + 1, "manifest": sha256}
    serves = len(pod["spec"]["containers"]) > 1
    return End(SYNCING, 0, json.dumps(message), names.SYNC_CONTAINER if serves else "")


def fails_prepared(pod: Body) -> End | None:
    """Like `prepares`, but a worker of the first gang fails."""
    labels = pod["metadata"]["labels"]
    if labels[names.COMPONENT_LABEL] == names.WORKER:
        return first_gang_fails(pod)
    return prepares(pod)


async def setup(world: Simulation) -> None:
    """A job creates its environment once for both of its gangs."""
    world.make_queue()
    world.submit(volumes=ZIP, setupCommand="make", annotations_=UPLOADED)
    await world.reaches("Succeeded", attempt=1)


async def direct(world: Simulation) -> None:
    """A pod serves the workspace to both gangs."""
    # Without a class, the time of the reconcile decides whether the PVC is abandoned.
    world.make_queue(storage={"workspace": {"storageClassName": "fast"}})
    world.submit(volumes=DIRECT, annotations_=UPLOADED)
    await world.reaches("Succeeded", attempt=1)


async def reload(world: Simulation) -> None:
    """Newer code reaches running workers."""
    world.make_queue()
    world.submit(volumes=ZIP, annotations_=UPLOADED)
    await world.trains()
    world.annotate(workspace_sha256=NEW)
    await world.reaches("Running", workspaceRevision=2)
    await world.finish()
    await world.reaches("Succeeded")


def workers_stay(pod: Body) -> End | None:
    """Like `prepares`, but workers run until they are deleted."""
    return None if is_worker(pod) else prepares(pod)


SCENARIOS = (
    Scenario("setup", setup, fails_prepared),
    Scenario("direct", direct, fails_prepared),
    Scenario("reload", reload, workers_stay),
)
