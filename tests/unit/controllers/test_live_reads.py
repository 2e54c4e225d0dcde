"""Live reads of the API server before an object is created again."""

from typing import Any

import msgspec
import pytest

from torchrun_api.core import Job, Pod
from torchrun_api.kinds import CLAIMS, JOBS, SERVICES, TORCHRUN_JOBS, Kind
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.client.reads import LiveObject
from torchrun_controller.client.write_errors import SupersededError
from torchrun_controller.controllers import live_reads
from torchrun_controller.reconcile import Observed, Plan
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.plan import Apply
from world import make_job

OWN = LiveObject("uid-train", "", is_ending=False)
GANG = LiveObject("uid-gang", "uid-train", is_ending=False)


class Server:
    def __init__(self, job: LiveObject | None = OWN, gang: LiveObject | None = None) -> None:
        self.has = {("TorchrunJob", "train"): job, ("Job", "train-r1"): gang}
        self.reads: list[tuple[str, str]] = []
        self.workers: frozenset[str] = frozenset()

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        self.reads.append((kind.kind, name))
        return self.has[kind.kind, name]

    async def find_workers(self, namespace: str, job: str) -> frozenset[str]:
        self.reads.append(("Pods", job))
        return self.workers


def makes(*kinds: Kind[Any]) -> Plan:
    return Plan(applies=tuple(Apply(kind, {"metadata": {"name": "train-r2"}}) for kind in kinds))


def seen(status: dict[str, Any], *attempts: int, pods: tuple[int, ...] = ()) -> Observed:
    """Job, status, the Jobs of these attempts, and pods of others."""
    job = make_job(numNodes=2)
    full_status = msgspec.convert(status, type(job.status))
    children = tuple(
        msgspec.convert({"metadata": {"labels": {"torchrun.ai/attempt": str(each)}}}, Job)
        for each in attempts
    )
    stale_pods = tuple(
        msgspec.convert({"metadata": {"labels": {"torchrun.ai/attempt": str(each)}}}, Pod)
        for each in pods
    )
    return Observed(
        job=msgspec.structs.replace(job, status=full_status),
        gang=ObservedGang(child_jobs=children, stale_pods=stale_pods),
    )


HAD_A_GANG = {"phase": "Running", "attempt": 1, "workers": {}}


@pytest.mark.parametrize(
    ("observed", "plan"),
    [
        (seen({}), makes(SERVICES, JOBS)),
        (seen({"phase": "Syncing"}), makes(SERVICES, JOBS)),
        (seen(HAD_A_GANG, 0, 1), makes(JOBS)),
        (seen(HAD_A_GANG), Plan()),
    ],
    ids=["first", "workspace is ready", "restart", "nothing is made"],
)
async def test_no_live_read_when_the_cache_suffices(observed, plan):
    server = Server()
    await live_reads.verify(server, observed, plan)
    assert server.reads == []


@pytest.mark.parametrize(
    ("server", "observed", "plan"),
    [
        (Server(job=None), seen(HAD_A_GANG), makes(JOBS)),
        (Server(job=LiveObject("another", "", is_ending=False)), seen(HAD_A_GANG), makes(JOBS)),
        (Server(job=None), seen({"phase": "Syncing"}), makes(CLAIMS)),
        (Server(gang=GANG), seen(HAD_A_GANG), makes(JOBS)),
        (Server(gang=GANG), seen(HAD_A_GANG, 0), makes(JOBS)),
        (Server(gang=GANG), seen({}, pods=(1,)), makes(SERVICES, JOBS)),
        (Server(gang=GANG), seen({**HAD_A_GANG, "attempt": 0}, 0, pods=(1,)), makes(JOBS)),
    ],
    ids=[
        *("gone", "replaced", "gone while it syncs", "gang not shown", "newest gang not shown"),
        *("only pods are shown", "only pods of the newest gang are shown"),
    ],
)
async def test_no_decision_from_caches_that_are_behind(server, observed, plan):
    with pytest.raises(SupersededError):
        await live_reads.verify(server, observed, plan)


@pytest.mark.parametrize("phase", ["Suspended", "Preempted"])
async def test_no_pod_remains_only_if_the_server_has_none(phase):
    """The Job was deleted before the watch of pods, which is dead, showed its pods."""
    plan = Plan(status=msgspec.convert({"phase": phase}, TorchrunJobStatus))
    server = Server()
    server.workers = frozenset({"uid-a", "uid-b"})
    with pytest.raises(SupersededError, match="does not show 2 pods"):
        await live_reads.verify(server, seen(HAD_A_GANG, 1), plan)
    server.workers = frozenset()
    await live_reads.verify(server, seen(HAD_A_GANG, 1), plan)
    assert server.reads == [("Pods", "train")] * 2
    for observed in (seen({"phase": phase, "workers": {}}, 1), seen({"phase": "Pending"})):
        await live_reads.verify(server, observed, plan)
    assert len(server.reads) == 2, "a repeated status needs no read, nor does a job without a gang"


async def test_pods_on_lost_nodes_may_remain():
    plan = Plan(status=msgspec.convert({"phase": "Suspended"}, TorchrunJobStatus))
    server = Server()
    server.workers = frozenset({"uid-lost"})
    observed = seen(HAD_A_GANG, 1)
    lost = msgspec.convert({"metadata": {"uid": "uid-lost"}}, Pod)
    gang = msgspec.structs.replace(observed.gang, workers=(lost,))
    await live_reads.verify(server, msgspec.structs.replace(observed, gang=gang), plan)


@pytest.mark.parametrize("end", [{"phase": "Failed"}, {"attempts": [{"number": 1}]}])
async def test_a_gang_that_the_cache_does_not_show_yet_is_not_given_up(end):
    """The Job seems to be deleted. With restartPolicy Never, the TorchrunJob would fail."""
    plan = Plan(status=msgspec.convert(end, TorchrunJobStatus))
    with pytest.raises(SupersededError, match="exists"):
        await live_reads.verify(Server(gang=GANG), seen(HAD_A_GANG, 0), plan)
    await live_reads.verify(Server(gang=None), seen(HAD_A_GANG, 0), plan)
    observed = seen({**HAD_A_GANG, "attempts": [{"number": 1}]})
    server = Server(gang=GANG)
    await live_reads.verify(server, observed, Plan(status=observed.job.status))
    assert server.reads == []


@pytest.mark.parametrize(
    "gang",
    [
        None,
        LiveObject("u", "uid-of-another-job", is_ending=False),
        LiveObject("u", "uid-train", is_ending=True),
    ],
    ids=["deleted", "foreign", "is being deleted"],
)
async def test_a_deleted_gang_is_replaced(gang):
    server = Server(gang=gang)
    await live_reads.verify(server, seen(HAD_A_GANG), makes(JOBS))
    assert server.reads == [(TORCHRUN_JOBS.kind, "train"), (JOBS.kind, "train-r1")]


def short_of_a_node() -> Observed:
    """An elastic gang of two. The cache shows a node for one worker only."""
    job = make_job(numNodes=2, elastic={"minNodes": 1, "maxNodes": 2})
    status = msgspec.convert({"phase": "Queued", "attempt": 1, "workers": {}}, type(job.status))
    child = msgspec.convert({"metadata": {"labels": {"torchrun.ai/attempt": "1"}}}, Job)
    pods = tuple(
        msgspec.convert(
            {
                "metadata": {"name": f"train-r1-{index}", "resourceVersion": "7"},
                "spec": {"nodeName": node},
                "status": {"phase": "Pending"},
            },
            Pod,
        )
        for index, node in enumerate(("node-0", ""))
    )
    job = msgspec.structs.replace(job, status=status)
    return Observed(job=job, gang=ObservedGang(child_jobs=(child,), workers=pods))


@pytest.mark.parametrize("version", ["8", None], ids=["changed", "gone"])
async def test_a_stale_pod_does_not_shrink_a_gang(version):
    server = Server()
    found = None if version is None else LiveObject("uid-pod", "uid-gang", False, version)
    server.has["Pod", "train-r1-1"] = found
    with pytest.raises(SupersededError, match="train-r1-1"):
        await live_reads.verify(server, short_of_a_node(), makes(JOBS))


async def test_an_unscheduled_pod_is_read_once():
    server = Server()
    server.has["Pod", "train-r1-1"] = LiveObject("uid-pod", "uid-gang", False, "7")
    await live_reads.verify(server, short_of_a_node(), makes(JOBS))
    assert server.reads == [("Pod", "train-r1-1")]


async def test_pods_are_not_read_without_a_new_gang():
    server = Server()
    await live_reads.verify(server, short_of_a_node(), Plan())
    assert server.reads == []
