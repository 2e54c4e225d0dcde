"""Writes of an audit log that were sent without the lease."""

from integration.audit import Write, without_lease


def lease(who: str, at: float) -> Write:
    body = {"spec": {"holderIdentity": who, "leaseDurationSeconds": 6}}
    return Write(who, at, at, "patch", "leases", "ha", 200, body)


def job(who: str, at: float, name: str, code: int = 201) -> Write:
    return Write(who, at, at, "patch", "jobs", name, code, None)


CHANGES_HANDS = (lease("first", 0.0), job("first", 1.0, "a"), lease("second", 20.0))


def test_a_write_after_the_lease_changed_hands() -> None:
    late = job("first", 21.0, "b")
    assert without_lease([*CHANGES_HANDS, late]) == [late]


def test_a_frozen_leader_may_create_one_object() -> None:
    writes = [*CHANGES_HANDS, job("first", 21.0, "b"), job("first", 21.1, "c")]
    assert without_lease(writes, frozen=True) == [writes[-1]]


def test_a_frozen_leader_may_change_nothing() -> None:
    change = job("first", 21.0, "b", 200)
    assert without_lease([*CHANGES_HANDS, change], frozen=True) == [change]
