"""Leaders against one lease, in virtual time."""

import asyncio
from datetime import UTC, datetime

import pytest

from torchrun_controller.leader import NoElection, NotLeader
from unit.leader.electing import leading, make, now, refuse, running, until
from unit.leader.lease_server import Client, LeaseServer
from virtual_time import in_virtual_time


@in_virtual_time
async def test_the_first_leads_and_the_second_waits() -> None:
    server = LeaseServer()
    first, second = make(Client(server, "a")), make(Client(server, "b"))
    async with running(first), running(second):
        await first.elected.wait()
        assert now() < 0.01
        await until(120)
        assert first.may_write()
        first.check()
        assert not second.elected.is_set()
        with pytest.raises(NotLeader, match="lease system/controller is held by a"):
            second.check()
    renewals = [entry for entry in server.log if entry[1:] == ("a", "PATCH")]
    assert len(renewals) == pytest.approx(60, abs=2)
    assert server.spec["leaseTransitions"] == 0


@in_virtual_time
async def test_no_writes_before_the_election() -> None:
    leader = make(Client(LeaseServer(), "a"))
    assert not leader.may_write()
    with pytest.raises(NotLeader, match="held by nobody"):
        leader.check()


@in_virtual_time
async def test_a_standby_replaces_a_dead_leader() -> None:
    server = LeaseServer()
    changes: list[float] = []
    first = make(Client(server, "a"))
    second = make(Client(server, "b"), lambda: changes.append(now()))
    async with leading(first) as task, running(second):
        await until(30.5)
        last = max(at for at, name, method in server.log if method == "PATCH")
        task.cancel()
        await second.elected.wait()
        assert 15 <= now() - last < 15.1
        second.check()
        assert server.spec["leaseTransitions"] == 1
        await until(60)
        assert len(changes) == 1


@in_virtual_time
@pytest.mark.parametrize("years", [-30, 30])
async def test_clock_skew_of_years_has_no_effect(years: int) -> None:
    server = LeaseServer()
    skewed = datetime(2026 + years, 1, 1, tzinfo=UTC)
    first, second = make(Client(server, "a")), make(Client(server, "b"), wall=skewed)
    async with leading(first) as task, running(second):
        await until(60)
        assert not second.elected.is_set(), "a renewed lease is not taken"
        task.cancel()
        last = max(at for at, name, method in server.log if method == "PATCH")
        await second.elected.wait()
        assert 15 <= now() - last < 15.1
        assert server.spec["renewTime"].startswith(str(skewed.year))


@in_virtual_time
async def test_a_released_lease_is_taken_at_once() -> None:
    server = LeaseServer()
    first, second = make(Client(server, "a")), make(Client(server, "b"))
    async with leading(first) as task, running(second):
        await until(33.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert first.may_write()  # workers may finish
        await first.release()
        assert not first.may_write()
        released = now()
        await second.elected.wait()
        assert now() - released < 0.01


@in_virtual_time
async def test_without_a_watch_polling_finds_a_released_lease() -> None:
    server = LeaseServer()
    blind = Client(server, "b")
    blind.fault = refuse(403, "WATCH")
    first, second = make(Client(server, "a")), make(blind)
    async with leading(first) as task, running(second):
        await until(33.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await first.release()
        released = now()
        await second.elected.wait()
        assert 0.1 < now() - released < 4.5
    assert 5 < blind.watches < 20


@in_virtual_time
async def test_a_stolen_lease_is_detected_at_once() -> None:
    server = LeaseServer()
    leader = make(Client(server, "a"))
    async with leading(leader) as task:
        await until(31)
        server.edit(holderIdentity="thief")
        with pytest.raises(NotLeader, match="thief holds it now"):
            await task
        assert now() == 31
        assert not leader.may_write()
        await leader.release()
    assert server.spec["holderIdentity"] == "thief"


@in_virtual_time
async def test_the_leader_recreates_a_deleted_lease_and_a_standby_does_not() -> None:
    server = LeaseServer()
    first, second = make(Client(server, "a")), make(Client(server, "b"))
    async with leading(first), running(second):
        await until(30)
        server.delete()
        await until(60)
        first.check()
        assert not second.elected.is_set()
    assert server.spec["holderIdentity"] == "a"


@in_virtual_time
async def test_a_cancelled_write_still_releases_the_lease() -> None:
    server = LeaseServer()
    client = Client(server, "a")
    client.delay = 1.0
    client.fault = refuse(500, "WATCH")
    leader = make(client)
    async with running(leader) as task:
        await until(1.75)  # created, but without a response yet
        assert server.spec["holderIdentity"] == "a"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await leader.release()
    assert server.spec["holderIdentity"] == ""
    assert server.spec["leaseDurationSeconds"] == 1


@in_virtual_time
async def test_a_release_with_a_conflict() -> None:
    server = LeaseServer()
    leader = make(Client(server, "a"))
    async with leading(leader):
        pass
    server.annotate()
    await leader.release()
    assert server.spec["holderIdentity"] == ""


@in_virtual_time
async def test_a_release_does_not_touch_the_lease_of_another() -> None:
    server = LeaseServer()
    leader = make(Client(server, "a"))
    async with leading(leader):
        pass
    server.edit(holderIdentity="b")
    await leader.release()
    assert server.spec["holderIdentity"] == "b"
    server.delete()
    await leader.release()
    assert server.object is None


@in_virtual_time
async def test_a_standby_releases_nothing() -> None:
    server = LeaseServer()
    first, second = make(Client(server, "a")), make(Client(server, "b"))
    async with leading(first):
        async with running(second):
            await until(10)
        await second.release()
        await until(30)
        first.check()
    assert not [entry for entry in server.log if entry[1:] == ("b", "PATCH")]


@pytest.mark.parametrize("kind", ["refused", "hanging"])
@in_virtual_time
async def test_a_failed_release_is_bounded_and_raises_nothing(kind: str) -> None:
    server = LeaseServer()
    client = Client(server, "a")
    leader = make(client)
    async with leading(leader):
        pass
    if kind == "refused":
        client.fault = refuse(500)
    else:
        client.delay = 3600
    began = now()
    await leader.release()
    assert now() - began <= 5
    assert not leader.may_write()


@in_virtual_time
async def test_run_does_not_restart_after_a_release() -> None:
    leader = make(Client(LeaseServer(), "a"))
    async with leading(leader) as task:
        await leader.release()
        with pytest.raises(NotLeader):
            await task


@in_virtual_time
async def test_without_election_the_process_always_leads() -> None:
    solo = NoElection()
    assert solo.elected.is_set()
    assert solo.may_write()
    solo.check()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(solo.run(), 1000)
    await solo.release()
    assert solo.problem == ""
