"""The pure state machine: records and times in, decisions out."""

from datetime import UTC, datetime, timedelta, timezone

import hypothesis.strategies as st
import pytest
from hypothesis import given

from torchrun_api.kinds.meta import ObjectMeta
from torchrun_controller.leader.election import (
    Durations,
    Election,
    Lease,
    LeaseLost,
    LeasePause,
    LeaseSpec,
    ReadLease,
    WriteLease,
)

WALL = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def lease(
    holder: str, version: int, renewed: str = "t0", duration: int | None = 15, transitions: int = 3
) -> Lease:
    spec = LeaseSpec(
        holder_identity=holder,
        lease_duration_seconds=duration,
        renew_time=renewed,
        lease_transitions=transitions,
    )
    return Lease(metadata=ObjectMeta(resource_version=str(version)), spec=spec)


def standby() -> Election:
    return Election("me", Durations())


def leader(at: float = 100.0) -> Election:
    """A leader that renewed its lease at this time."""
    election = standby()
    election.absent(at, 0)
    election.unsure(at, 0)
    election.renewed(lease("me", 10), at, at)
    return election


def waits(election: Election, now: float) -> float:
    decision = election.decide(now)
    assert isinstance(decision, LeasePause)
    return decision.seconds


def test_at_first_the_lease_is_read() -> None:
    assert standby().decide(0) == ReadLease()


def test_an_absent_lease_is_created() -> None:
    election = standby()
    election.absent(0, 0)
    assert election.decide(0) == WriteLease("")
    assert election.record(WALL) == {
        "holderIdentity": "me",
        "leaseDurationSeconds": 15,
        "acquireTime": "2030-01-02T03:04:05.000678Z",
        "renewTime": "2030-01-02T03:04:05.000678Z",
        "leaseTransitions": 0,
    }


def test_times_are_written_in_utc() -> None:
    there = WALL.astimezone(timezone(timedelta(hours=5)))
    assert standby().record(there)["renewTime"] == "2030-01-02T03:04:05.000678Z"


@pytest.mark.parametrize(
    ("named", "seconds"), [(10**400, 86_400), (-1, 15), (0, 15), (-(10**400), 15), (None, 15)]
)
def test_an_invalid_duration_does_not_end_the_process(named: int | None, seconds: float) -> None:
    election = standby()
    election.read(lease("other", 5, duration=named), 100, 0)
    assert not isinstance(election.decide(99 + seconds), WriteLease)
    assert isinstance(election.decide(101 + seconds), WriteLease)


def test_a_released_lease_is_taken_at_once() -> None:
    election = standby()
    election.read(lease("other", 5), 100, 0)
    assert isinstance(election.decide(100.5), LeasePause)
    election.watched(lease("", 6, duration=1), 100.5)
    assert election.decide(100.5) == WriteLease("6")
    assert election.record(WALL)["leaseTransitions"] == 4
    assert election.record(WALL)["acquireTime"] == election.record(WALL)["renewTime"]


def test_a_held_lease_is_watched_until_its_record_has_not_changed_for_its_duration() -> None:
    election = standby()
    election.read(lease("other", 5), 100, 1)  # the next read after 2 x (1 + 1.2) s
    assert waits(election, 100) == pytest.approx(4.4)
    assert election.decide(104.4) == ReadLease()
    election.watched(lease("other", 6, "t1"), 104)
    election.read(lease("other", 6, "t1"), 118, 1)
    assert waits(election, 118) == pytest.approx(1)
    assert waits(election, 118.999) == pytest.approx(0.001)
    assert election.decide(119) == WriteLease("6")


def test_the_duration_of_the_record_counts() -> None:
    election = standby()
    election.read(lease("other", 5, duration=40), 100, 0)
    election.read(lease("other", 5, duration=40), 139, 0)
    assert isinstance(election.decide(139.9), LeasePause)
    assert election.decide(140) == WriteLease("5")


@pytest.mark.parametrize("duration", [None, 0])
def test_a_record_without_a_duration_gets_ours(duration: int | None) -> None:
    election = standby()
    election.read(lease("other", 5, duration=duration), 100, 0)
    assert isinstance(election.decide(101), LeasePause)
    assert election.decide(115) == WriteLease("5")


def test_a_change_of_the_metadata_alone_is_no_renewal() -> None:
    election = standby()
    election.read(lease("other", 5), 100, 0)
    election.watched(lease("other", 6), 110)
    assert election.decide(115) == WriteLease("6")


def test_an_older_version_from_a_watch_is_ignored() -> None:
    election = standby()
    election.read(lease("other", 5), 100, 0)
    election.watched(lease("", 4), 100)
    election.deleted(4)
    assert election.holder == "other"
    assert election.version == "5"
    election.read(lease("third", 2), 100, 0)  # etcd was restored from a backup
    assert election.holder == "third"
    assert election.version == "2"


def test_a_deleted_lease_stays_with_its_holder_until_its_expiry() -> None:
    election = standby()
    election.read(lease("other", 5), 100, 0)
    election.deleted(6)
    assert isinstance(election.decide(101), LeasePause)
    election.absent(114, 0)
    assert election.decide(114) == LeasePause(1)
    assert election.decide(115) == WriteLease("")
    assert election.record(WALL)["leaseTransitions"] == 4


def test_a_failed_write_is_paced_and_followed_by_a_read() -> None:
    election = standby()
    election.absent(100, 0)
    election.unsure(100, 0.5)  # 2 x (1 + 0.6) s
    assert waits(election, 101) == pytest.approx(2.2)
    assert election.decide(103.3) == ReadLease()


def test_a_write_without_a_response_is_confirmed_by_a_read() -> None:
    election = standby()
    election.absent(100, 0)
    election.unsure(100, 0)
    election.read(lease("me", 7), 103, 0)
    assert election.writable_until() < 0
    assert election.decide(103) == WriteLease("7")
    assert "leaseTransitions" not in election.record(WALL)
    assert "acquireTime" not in election.record(WALL)


def test_a_leader_renews_and_may_write_until_the_deadline_from_the_sending() -> None:
    election = standby()
    election.absent(100, 0)
    election.unsure(100, 0)
    election.renewed(lease("me", 10), 100, 104)
    assert election.writable_until() == 110
    assert election.decide(101) == LeasePause(1)
    assert election.decide(102) == WriteLease("10")
    assert "acquireTime" not in election.record(WALL)
    election.unsure(102, 0)
    election.renewed(lease("me", 11, "t1"), 102, 103)
    assert election.writable_until() == 112
    assert election.decide(104) == WriteLease("11")


def test_a_leader_that_cannot_renew_reads_again_until_it_is_lost_at_the_deadline() -> None:
    election = leader(100)
    election.unsure(102, 0)
    assert election.decide(102) == LeasePause(2)
    assert election.decide(104) == ReadLease()
    election.unsure(109, 0)
    assert election.decide(109.5) == LeasePause(0.5)
    assert isinstance(election.decide(110), LeaseLost)
    assert election.writable_until() == 110


def test_a_leader_reads_and_then_renews_at_once() -> None:
    election = leader(100)
    election.unsure(102, 0)
    election.unsure(104, 0)
    election.read(lease("me", 12), 104.1, 0)
    assert election.decide(104.1) == WriteLease("12")


def test_a_leader_that_sees_another_holder_has_lost_at_once() -> None:
    election = leader(100)
    election.watched(lease("other", 20), 101)
    assert election.decide(101) == LeaseLost("other holds it now")
    assert election.writable_until() < 0


def test_a_leader_recreates_a_deleted_lease_with_its_transitions() -> None:
    election = leader(100)
    election.deleted(20)
    assert election.decide(102) == WriteLease("")
    assert election.record(WALL)["leaseTransitions"] == 3
    assert "acquireTime" in election.record(WALL)


def test_a_response_with_another_holder_is_no_success() -> None:
    election = standby()
    election.absent(100, 0)
    election.unsure(100, 0)
    with pytest.raises(ValueError, match="other"):
        election.renewed(lease("other", 7), 100, 100)
    assert election.writable_until() < 0
    assert isinstance(election.decide(101), LeasePause)


@pytest.mark.parametrize("version", ["", "abc"])
def test_an_invalid_version_is_an_error(version: str) -> None:
    odd = Lease(metadata=ObjectMeta(resource_version=version))
    election = standby()
    with pytest.raises(ValueError, match="invalid literal"):
        election.read(odd, 0, 0)
    with pytest.raises(ValueError, match="invalid literal"):
        election.watched(odd, 0)


def test_a_replica_that_resigned_never_leads_again() -> None:
    election = leader(100)
    election.resign()
    assert election.writable_until() < 0
    assert isinstance(election.decide(100), LeaseLost)
    election.watched(lease("", 30), 101)
    assert isinstance(election.decide(101), LeaseLost)
    other = standby()
    other.resign()
    assert isinstance(other.decide(0), LeaseLost)


def test_the_record_of_a_release() -> None:
    assert leader().vacancy(WALL) == {
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "renewTime": "2030-01-02T03:04:05.000678Z",
    }


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ({"lease": 10}, "lease duration must be longer"),
        ({"renew_deadline": 2.3}, "1.2 times the retry"),
        ({"jitter": 5}, "5 times the retry"),
        ({"jitter": 0, "renew_deadline": 2}, "1 times the retry"),
        ({"retry": 0}, "above 0"),
        ({"lease": 0.5, "renew_deadline": 0.4, "retry": 0.1}, "at least 1 s"),
    ],
)
def test_impossible_durations_are_refused(durations: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Durations(**durations)


EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0, 20)),
    st.tuples(st.just("unsure"), st.floats(0, 0.99)),
    st.tuples(st.just("renewed"), st.floats(0, 5)),
    st.tuples(st.just("read"), st.sampled_from(["me", "a", "b", ""])),
    st.tuples(st.just("watched"), st.sampled_from(["me", "a", "b", ""])),
    st.tuples(st.just("gone"), st.just("")),
    st.tuples(st.just("absent"), st.floats(0, 0.99)),
)


@given(st.lists(EVENTS, max_size=40))
def test_writes_are_allowed_only_after_a_fresh_renewal(
    events: list[tuple[str, float | str]],
) -> None:
    election, now, version = standby(), 0.0, 1
    sent = None
    for kind, value in events:
        version += 1
        match kind, value:
            case "wait", float(seconds):
                now += seconds
            case "unsure", float(jitter):
                election.unsure(now, jitter)
            case "renewed", float(latency):
                sent = now
                election.unsure(now, 0)
                now += latency
                election.renewed(lease("me", version), sent, now)
            case "read", str(holder):
                election.read(lease(holder, version, str(version)), now, 0)
            case "watched", str(holder):
                election.watched(lease(holder, version, str(version)), now)
            case "gone", _:
                election.deleted(version)
            case "absent", float(jitter):
                election.absent(now, jitter)
        decision = election.decide(now)
        if now < election.writable_until():
            assert sent is not None
            assert now < sent + 10
            assert election.holder == "me"
            assert not isinstance(decision, LeaseLost)
        elif sent is not None:
            assert isinstance(decision, LeaseLost)
        if isinstance(decision, LeasePause):
            assert 0 < decision.seconds <= 15
        if isinstance(decision, WriteLease) and sent is None and election.holder not in ("", "me"):
            assert now >= election._changed_at + 15
