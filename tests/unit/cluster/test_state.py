"""A cluster's record, and ports that clusters do not share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchrun_cluster import ClusterError, LocalCluster, Size, state
from torchrun_cluster.state import Spec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHRUN_STATE", str(tmp_path))
    # Ports that clusters of other tests do not claim.
    monkeypatch.setattr(state, "FIRST_PORT", 9_000)
    monkeypatch.setattr(state, "LAST_PORT", 9_900)
    return tmp_path


def test_a_record_is_read_back() -> None:
    arguments = {"etcd": ["--log-level=debug"]}
    spec = Spec("demo", Size.CONTROL_PLANE, scheduler=True, extra_args=arguments)
    created = state.create(spec)
    assert state.read("demo") == created
    created.completed().write()
    assert state.read("demo") == created.completed()
    having = created.having({"volcano": ["volcano-scheduler"]})
    assert state.read("demo") == having
    assert having.components == (*spec.components, "volcano-scheduler")


@pytest.mark.parametrize("content", ["", "{", "{}", '{"spec": {"size": "huge"}}', "[]"])
def test_an_unreadable_record_is_no_record(home: Path, content: str) -> None:
    (home / "demo").mkdir()
    (home / "demo" / "cluster.json").write_text(content)
    assert state.read("demo") is None
    assert state.names() == ["demo"]


def test_clusters_never_share_a_port() -> None:
    all_ports: list[int] = []
    for name in ("one", "two", "three"):
        ports = state.create(Spec(name, Size.NODE)).ports
        all_ports += [ports.api, ports.etcd, ports.peer, ports.webhook]
    assert len(set(all_ports)) == 12


def test_a_port_in_use_is_skipped_or_refused() -> None:
    with socket.create_server(("127.0.0.1", state.create(Spec("probe", Size.NODE)).ports.api)) as s:
        taken = s.getsockname()[1]
        assert state.create(Spec("probe", Size.NODE)).ports.api != taken
        with pytest.raises(ClusterError, match="--port"):
            state.create(Spec("other", Size.NODE, port=taken))


@pytest.mark.parametrize("name", ["", "UPPER", "a/b", "..", "-a", "a-", "a" * 33, "a b"])
def test_names_with_path_separators_are_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="lowercase"):
        Spec(name, Size.NODE)


@pytest.mark.parametrize(
    ("count", "size", "message"),
    [(0, Size.NODE, "1 to 16"), (17, Size.NODE, "1 to 16"), (2, Size.CONTROL_PLANE, "no nodes")],
)
def test_a_wrong_number_of_nodes_is_refused(count: int, size: Size, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Spec("demo", size, nodes=count)


def test_nodes_share_no_name_address_or_folder() -> None:
    created = state.create(Spec("demo", Size.NODE, nodes=3))
    assert state.read("demo") == created
    for part in ("name", "address", "pods", "folder", "cgroup"):
        assert len({getattr(node, part) for node in created.nodes}) == 3
    assert len(set(created.components)) == len(created.components)
    assert {"kubelet", "kubelet@node-2", "kubelet@node-3"} < set(created.components)


def test_extra_arguments_for_an_unknown_component_are_refused() -> None:
    with pytest.raises(ClusterError, match="kubelet"):
        LocalCluster(size=Size.CONTROL_PLANE, extra_args={"kubelet": ["--v=4"]})


def test_a_stopped_cluster_is_reported() -> None:
    with pytest.raises(ClusterError, match="not up"):
        _ = LocalCluster(name="absent").kubeconfig
    with pytest.raises(ClusterError, match="up --name absent"):
        LocalCluster.existing("absent")


def test_cgroups_of_two_users_clusters_differ(tmp_path: Path) -> None:
    names = {state.cgroup_of(tmp_path / user / "demo") for user in ("a", "b")}
    assert len(names) == 2
    assert all(name.startswith("torchrun-demo-") for name in names)
