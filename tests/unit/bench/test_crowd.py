"""Copies of a job in etcd, and the hour of pod events beside them."""

import pytest

from torchrun_bench import bodies, crowd, hour
from torchrun_bench.bare import LISTED
from torchrun_bench.crowd import Crowd
from torchrun_bench.http import Server
from torchrun_bench.processes import CONTROLLER_NAMESPACE, Requests, Usage

UID = b"11111111-2222-3333-4444-555555555555"
KEY = b"/registry/pods/bench-controller/gang-xxxxx-0-abcde"
VALUE = b"\x0aname gang-xxxxx-0 namespace bench-controller uid " + UID


class _Etcd:
    def __init__(self, name: str) -> None:
        self.closed = False

    def under(self, prefix: str) -> dict[bytes, bytes]:
        return {KEY: VALUE} if prefix.startswith("/registry/pods/") else {}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Crowd:
    monkeypatch.setattr(crowd, "Etcd", _Etcd)
    server = Server("https://127.0.0.1:1", "ca", "certificate", "key")
    return Crowd(None, "name", server, 2, 500)


@pytest.mark.parametrize("number", [1, 499, 500, 9999])
def test_a_copy_has_the_length_of_the_original_in_another_namespace(copied: Crowd, number: int):
    ((key, value),) = copied._copy(number)
    team = f"bench-team-{number % 500:05d}".encode()
    assert key == b"/registry/pods/%s/gang-%05d-0-abcde" % (team, number)
    assert len(value) == len(VALUE)
    assert team in value
    assert b"%08x-2222-3333-4444-555555555555" % number in value
    assert b"bench-controller" not in value


def test_namespaces_have_one_length():
    assert len(bodies.team(0)) == len(bodies.team(99_999)) == len(CONTROLLER_NAMESPACE)


def test_an_event_is_of_a_pod_that_exists(copied: Crowd):
    assert copied.pods == ["gang-xxxxx-0-abcde"]
    assert hour.pod_name(copied.pods, 42, 7) == "gang-00042-0-abcde"
    assert len(copied.namespaces) == 501


def test_the_growth_of_memory_is_that_of_the_later_half():
    def sample(minute: int, mib: float) -> hour.Sample:
        return hour.Sample(minute * 60.0, Usage(0.1 * minute, mib, mib))

    samples = [sample(minute, 50.0 + 30 * min(minute, 30)) for minute in range(60)]
    assert hour.slope(samples) == pytest.approx(0.0, abs=1e-6)
    grown = [sample(minute, 50.0 + minute) for minute in range(60)]
    assert hour.slope(grown) == pytest.approx(60.0)
    made = {row.what.partition(": ")[2]: row for row in hour.rows(grown, 2950, Requests({}), 60)}
    assert made["share of a core"].controller == pytest.approx(100 * 5.9 / (59 * 60), abs=1e-3)
    assert made["CPU for an event"].controller == pytest.approx(2.0)
    assert made["writes"].met
    written = hour.rows(grown, 2950, Requests({("patch", "pods"): 1}), 60)
    assert [row.what.rpartition(": ")[2] for row in written if not row.met] == ["writes"]


def test_the_lists_are_of_one_or_all_namespaces():
    paths = [path for path, _ in LISTED]
    assert "/api/v1/pods" in [path.format("") for path in paths]
    assert "/api/v1/namespaces/team/pods" in [path.format("/namespaces/team") for path in paths]
