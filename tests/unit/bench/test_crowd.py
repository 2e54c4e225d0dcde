"""Copies of a job in etcd."""

import pytest

from torchrun_bench import bodies, crowd
from torchrun_bench.bare import LISTED
from torchrun_bench.crowd import Crowd
from torchrun_bench.http import Server
from torchrun_bench.processes import CONTROLLER_NAMESPACE

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


def test_the_lists_are_of_one_or_all_namespaces():
    paths = [path for path, _ in LISTED]
    assert "/api/v1/pods" in [path.format("") for path in paths]
    assert "/api/v1/namespaces/team/pods" in [path.format("/namespaces/team") for path in paths]
