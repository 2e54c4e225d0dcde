"""A leader with faults of network and API server, in virtual time."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

from torchrun_controller.client import Disconnected, Response
from torchrun_controller.leader import Durations, Leader, NotLeader
from unit.leader.electing import disconnect, leading, make, now, refuse, running, until
from unit.leader.lease_server import Client, LeaseServer
from virtual_time import in_virtual_time


@pytest.mark.parametrize(
    "fault", [refuse(429), refuse(500), refuse(403), refuse(401), refuse(404), disconnect]
)
@in_virtual_time
async def test_eight_seconds_of_errors_do_not_lose_the_lease(fault: Callable[[str], None]) -> None:
    server = LeaseServer()
    client = Client(server, "a")
    leader = make(client)
    async with leading(leader) as task:
        await until(20.1)
        client.fault = fault
        await until(26.1)
        assert leader.problem
        assert leader.may_write()
        client.fault = lambda method: None
        await until(60)
        assert not task.done()
        assert leader.may_write()
        assert leader.problem == ""
    attempts = [at for at, _, _ in server.log if 20.1 < at < 26.1]
    assert len(attempts) <= 4


@pytest.mark.parametrize(
    "garbage",
    [b"", b"<html>", b"{}", b"[]", b'{"metadata": {"resourceVersion": "x"}}', b"[" * 100_000],
)
@in_virtual_time
async def test_garbage_responses_do_not_lose_the_lease(garbage: bytes) -> None:
    server = LeaseServer()
    client = Client(server, "a")
    leader = make(client)
    async with leading(leader) as task:
        await until(20.1)
        client.answer = garbage
        await until(26.1)
        assert "cannot" in leader.problem
        client.answer = None
        await until(60)
        assert not task.done()
        assert leader.may_write()


@in_virtual_time
async def test_lost_responses_do_not_lose_the_lease() -> None:
    server = LeaseServer()
    client = Client(server, "a")
    leader = make(client)
    async with leading(leader) as task:
        await until(20.1)
        client.lose = True
        await until(26.1)
        client.lose = False
        await until(60)
        assert not task.done()
        leader.check()


@in_virtual_time
async def test_a_request_that_hangs_leaves_time_for_another() -> None:
    server = LeaseServer()
    client = Client(server, "a")
    leader = make(client)
    async with leading(leader) as task:
        await until(20.1)
        client.delay = 3600
        await until(25)
        client.delay = 0.001
        await until(60)
        assert not task.done()
        leader.check()


@in_virtual_time
async def test_a_slow_renewal_counts_from_its_request() -> None:
    client = Client(LeaseServer(), "a")
    client.delay = 4.0
    leader = make(client)
    async with leading(leader) as task:
        elected = now()
        client.fault = refuse(500)
        with pytest.raises(NotLeader, match="not renewed within 10 s"):
            await task
        assert now() == pytest.approx(elected - 4 + 10)


@pytest.mark.parametrize("kind", ["refused", "hanging"])
@in_virtual_time
async def test_the_gate_closes_and_run_ends_at_the_deadline(kind: str) -> None:
    server = LeaseServer()
    client = Client(server, "a")
    leader = make(client)
    async with leading(leader) as task:
        await until(30.5)
        last = max(at for at, _, method in server.log if method == "PATCH")
        if kind == "refused":
            client.fault = refuse(500)
        else:
            client.delay = 3600
        await until(last + 9.9)
        leader.check()
        with pytest.raises(NotLeader, match="lost: it was not renewed"):
            await task
        assert now() == pytest.approx(last + 10, abs=0.01)
        assert not leader.may_write()


@in_virtual_time
async def test_the_gate_closes_by_itself_when_the_loop_was_busy() -> None:
    clock = [0.0]
    leader = Leader(
        Client(LeaseServer(), "a"),
        identity="a",
        namespace="system",
        name="controller",
        durations=Durations(),
        clock=lambda: now() + clock[0],
    )
    async with leading(leader):
        leader.check()
        clock[0] = 10  # no task could run meanwhile
        with pytest.raises(NotLeader):
            leader.check()


@in_virtual_time
async def test_a_metadata_conflict_keeps_lease_and_labels() -> None:
    server = LeaseServer()
    client = Client(server, "a")
    leader = make(client)
    async with leading(leader) as task:
        client.fault = refuse(500, "WATCH")
        for stream in list(server.streams):
            stream.put_nowait(None)  # without a watch, the conflict must occur
        assert server.object is not None
        server.object["metadata"]["labels"] = {"kept": "yes"}
        await until(5)
        server.annotate()
        await until(60)
        assert not task.done()
        leader.check()
    assert server.object["metadata"]["labels"] == {"kept": "yes"}


@pytest.mark.parametrize("method", ["POST", "PATCH"])
@in_virtual_time
async def test_a_standby_that_loses_the_race_for_the_lease_has_no_problem(method: str) -> None:
    server = LeaseServer()
    client = Client(server, "b")
    standby = make(client)
    if method == "PATCH":
        async with leading(make(Client(server, "a"))):
            pass
    client.fault = refuse(409, method)
    async with running(standby):
        await until(20)
        assert method in [used for _, name, used in server.log if name == "b"]
        assert standby.problem == ""
        client.fault = lambda method: None
        await standby.elected.wait()


@pytest.mark.parametrize(
    "frame",
    [
        None,
        Disconnected("silence"),
        b"garbage\n",
        b'{"type": "ERROR", "object": {"code": 410}}\n',
        b'{"type": "MODIFIED", "object": {"metadata": {"resourceVersion": ""}}}\n',
        b"x" * (2**20 + 1),
    ],
)
@in_virtual_time
async def test_a_broken_watch_is_reopened_slowly(
    frame: bytes | Exception | None,
) -> None:
    server = LeaseServer()
    client = Client(server, "a")
    leader = make(client)
    async with leading(leader) as task:
        for second in range(1, 60):
            for stream in list(server.streams):
                stream.put_nowait(frame)
            await until(second)
        assert 10 < client.watches < 31
        assert not task.done()
        for stream in list(server.streams):
            stream.put_nowait(b'{"type": "BOOKMARK", "object": {}}\n')
        await until(80)
        server.edit(holderIdentity="thief")
        with pytest.raises(NotLeader):
            await task
        assert now() == 80


@in_virtual_time
async def test_a_missing_permission_is_named() -> None:
    client = Client(LeaseServer(), "a")
    client.fault = refuse(403, "POST")
    leader = make(client)
    async with running(leader):
        await until(10)
    assert leader.problem.startswith("cannot create lease system/controller: 403")
    assert "lacks this verb on leases.coordination.k8s.io" in leader.problem


@in_virtual_time
async def test_a_bug_ends_run_with_its_exception() -> None:
    def bug(method: str) -> None:
        if method == "WATCH":
            raise ZeroDivisionError

    client = Client(LeaseServer(), "a")
    client.fault = bug
    with pytest.raises(ExceptionGroup) as bugs:
        await make(client).run()
    assert [type(bug) for bug in bugs.value.exceptions] == [ZeroDivisionError]


class Tidy(Client):
    """A transport whose requests need time for their cleanup."""

    open = 0

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> Response:
        self.open += 1
        try:
            return await super().request(method, path, body=body, content_type=content_type)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            self.open -= 1


@in_virtual_time
async def test_run_waits_for_the_cleanup_of_requests() -> None:
    client = Tidy(LeaseServer(), "a")
    client.delay = 1.0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make(client).run)
        await until(0.1)
        assert client.open == 1
        tasks.cancel_scope.cancel()
    assert client.open == 0


@pytest.mark.parametrize("seed", range(10))
@in_virtual_time
async def test_never_two_writers_under_random_network_faults(seed: int) -> None:
    chance = random.Random(seed)
    server = LeaseServer()
    clients = [Client(server, name) for name in "abc"]
    leaders = [make(client) for client in clients]
    led: set[str] = set()

    async def replica(index: int) -> None:
        while True:  # the process ends when it loses the lease, and restarts
            leaders[index] = make(clients[index])
            with suppress(NotLeader):
                await leaders[index].run()

    async def weather() -> None:
        while True:
            await asyncio.sleep(chance.uniform(0.1, 15))
            client = chance.choice(clients)
            client.fault = chance.choice(
                [refuse(500), refuse(429, "PATCH"), disconnect, *[lambda method: None] * 4]
            )
            client.delay = chance.choice([0.001, 0.001, 0.3, 4, 30])
            client.lose = chance.random() < 0.2
            if chance.random() < 0.2 and server.object is not None:
                server.annotate()
            for stream in list(server.streams):
                if chance.random() < 0.2:
                    stream.put_nowait(chance.choice([None, Disconnected("x"), b"?\n"]))

    tasks = [asyncio.create_task(replica(index)) for index in range(3)]
    tasks.append(asyncio.create_task(weather()))
    while now() < 1800:
        await asyncio.sleep(chance.uniform(0.05, 0.5))
        writers = [leader for leader in leaders if leader.may_write()]
        assert len(writers) <= 1
        led |= {leader._election.identity for leader in writers}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert led == {"a", "b", "c"}
