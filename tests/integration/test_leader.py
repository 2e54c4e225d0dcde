"""Leaders on a real API server, with exactly the permissions of the manifests."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from torchrun_cluster import LocalCluster, Size
from torchrun_controller.client import Connection
from torchrun_controller.leader import Durations, Leader, NotLeader

ROLE = Path(__file__).parents[2] / "manifests" / "rbac" / "role.yaml"
NAMESPACE = "torchrun-system"
LEASE = "torchrun-controller"
QUICK = Durations(lease=6, renew_deadline=5, retry=0.5)
# A busy machine may need more than the default deadline to restart an API server.
SLOW = Durations(lease=120, renew_deadline=100)
SLOW = Durations(lease=120, renew_deadline=100, retry=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # A separate control plane, as the tests stop the API server.
    with LocalCluster(name=f"test-leader-{os.getpid()}", size=Size.CONTROL_PLANE) as running:
        running.kubectl("create", "namespace", NAMESPACE)
        running.kubectl("create", "serviceaccount", LEASE, "-n", NAMESPACE)
        running.kubectl("apply", "-f", str(ROLE))
        yield running


@pytest.fixture(scope="module")
def kubeconfig(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    token = cluster.kubectl("create", "token", LEASE, "-n", NAMESPACE).stdout.strip()
    config = json.loads(cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    path = tmp_path_factory.mktemp("leader") / "kubeconfig"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture(autouse=True)
def no_lease(cluster: LocalCluster) -> None:
    cluster.kubectl("delete", "lease", LEASE, "-n", NAMESPACE, "--ignore-not-found")


@pytest.fixture(autouse=True)
async def closed_sockets() -> AsyncIterator[None]:
    # TLS closes in the background, so a loop that ends early leaves sockets open.
    sockets = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]
    before = len(sockets)
    yield
    await until(lambda: len(sockets) <= before)


@asynccontextmanager
async def replica(
    kubeconfig: str, identity: str, durations: Durations, namespace: str = NAMESPACE
) -> AsyncIterator[tuple[Leader, "asyncio.Task[None]"]]:
    connection = await Connection.load(kubeconfig, None)
    async with connection.session("lease") as transport:
        leader = Leader(
            transport, identity=identity, namespace=namespace, name=LEASE, durations=durations
        )
        run = asyncio.create_task(leader.run())
        try:
            yield leader, run
        finally:
            await ended(run)


async def ended(run: "asyncio.Task[None]") -> None:
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def elected(leader: Leader, within: float = 60) -> float:
    """Wait for the election. Returns the seconds."""
    began = time.monotonic()
    await asyncio.wait_for(leader.elected.wait(), within)
    return time.monotonic() - began


async def until(condition: Callable[[], bool], within: float = 60) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 the server is real, there is no event to wait for
            await asyncio.sleep(0.01)


async def lease(cluster: LocalCluster) -> dict[str, object]:
    # In a thread, because kubectl would block the event loop and lose the lease.
    get = ("get", "lease", LEASE, "-n", NAMESPACE, "-o", "json")
    shown = (await asyncio.to_thread(cluster.kubectl, *get)).stdout
    spec: dict[str, object] = json.loads(shown)["spec"]
    return spec


async def test_a_released_lease_is_taken_at_once(cluster: LocalCluster, kubeconfig: str) -> None:
    async with replica(kubeconfig, "a", SLOW) as (first, run):
        await elected(first)
        assert (await lease(cluster))["holderIdentity"] == "a"
        assert (await lease(cluster))["leaseTransitions"] == 0
        async with replica(kubeconfig, "b", SLOW) as (second, _):
            await until(lambda: second._election.holder == "a")
            assert not second.may_write()
            await ended(run)
            await first.release()
            took = await elected(second)
            print(f"taken over {took * 1000:.1f} ms after the release")
            assert took < SLOW.lease / 2, "or it has just expired"
            assert not first.may_write()
            second.check()
            assert second.problem == ""
            assert (await lease(cluster))["holderIdentity"] == "b"
            assert (await lease(cluster))["leaseTransitions"] == 1


async def test_a_dead_leader_is_replaced_after_the_lease_duration(
    cluster: LocalCluster, kubeconfig: str
) -> None:
    async with replica(kubeconfig, "a", QUICK) as (first, run):
        await elected(first)
        async with replica(kubeconfig, "b", QUICK) as (second, _):
            await until(lambda: second._election.holder == "a")
            await ended(run)
            renewed = first._election.writable_until() - QUICK.renew_deadline
            took = await elected(second)
            print(f"taken over {took:.2f} s after the death")
            assert time.monotonic() > renewed + QUICK.lease
            assert not first.may_write()
            assert (await lease(cluster))["leaseTransitions"] == 1


async def test_the_leader_recreates_a_deleted_lease(cluster: LocalCluster, kubeconfig: str) -> None:
    async with replica(kubeconfig, "a", Durations()) as (first, run):
        await elected(first)
        async with replica(kubeconfig, "b", Durations()) as (second, _):
            await until(lambda: second._election.holder == "a")
            await asyncio.to_thread(cluster.kubectl, "delete", "lease", LEASE, "-n", NAMESPACE)
            before = first._election.writable_until()
            await until(lambda: first._election.writable_until() > before)
            assert (await lease(cluster))["holderIdentity"] == "a"
            first.check()
            assert not run.done()
            assert not second.elected.is_set()


async def test_labels_of_others_stay(cluster: LocalCluster, kubeconfig: str) -> None:
    async with replica(kubeconfig, "a", QUICK) as (first, run):
        await elected(first)
        await asyncio.to_thread(
            cluster.kubectl, "label", "lease", LEASE, "-n", NAMESPACE, "owner=team-a"
        )
        await ended(run)
        await first.release()
    labels = cluster.kubectl(
        "get", "lease", LEASE, "-n", NAMESPACE, "-o", "jsonpath={.metadata.labels.owner}"
    )
    assert labels.stdout == "team-a"
    assert (await lease(cluster))["holderIdentity"] == ""


async def test_a_restart_of_the_api_server_does_not_lose_the_lease(
    cluster: LocalCluster, kubeconfig: str
) -> None:
    async with replica(kubeconfig, "a", SLOW) as (leader, run):
        await elected(leader)
        await asyncio.to_thread(cluster.restart, "kube-apiserver")
        before = leader._election.writable_until()
        await until(lambda: run.done() or leader._election.writable_until() > before)
        leader.check()


async def test_without_the_api_server_the_leader_stops_at_its_deadline(
    cluster: LocalCluster, kubeconfig: str
) -> None:
    async with replica(kubeconfig, "a", QUICK) as (leader, run):
        await elected(leader)
        ends: list[float] = []
        run.add_done_callback(lambda _: ends.append(time.monotonic()))
        await asyncio.to_thread(cluster.stop, "kube-apiserver")
        until = leader._election.writable_until()
        with pytest.raises(NotLeader, match="not renewed within 5 s"):
            await asyncio.wait_for(run, 120)
        late = ends[0] - until
        print(f"run ended {late * 1000:.1f} ms after the deadline")
        assert 0 <= late < 10, "no write is allowed after the deadline"
        assert not leader.may_write()
        await asyncio.to_thread(cluster.start, "kube-apiserver")
    async with replica(kubeconfig, "b", QUICK) as (second, _):
        await elected(second)
        assert (await lease(cluster))["leaseTransitions"] == 1


async def test_a_missing_permission_is_named(cluster: LocalCluster, kubeconfig: str) -> None:
    async with replica(kubeconfig, "a", QUICK, namespace="default") as (leader, _):
        await until(lambda: "403 Forbidden" in leader.problem)
    assert leader.problem.startswith(f"cannot get lease default/{LEASE}: 403 Forbidden")
    assert "lacks this verb on leases.coordination.k8s.io" in leader.problem
