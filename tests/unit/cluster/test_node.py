"""Files of nodes, without their namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrun_cluster import node, packages, places, state
from torchrun_cluster.state import Size, Spec, State

pytestmark = pytest.mark.skipif(packages.find("ptp") is None, reason="needs the CNI plugins")
DATABASE = Path("io.containerd.metadata.v1.bolt", "meta.db")
LAYER = Path("io.containerd.snapshotter.v1.overlayfs", "snapshots", "1", "fs", "file")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setenv("TORCHRUN_STATE", str(tmp_path / "clusters"))
    monkeypatch.setenv("TORCHRUN_CACHE", str(tmp_path / "cache"))
    return state.create(Spec("demo", Size.NODE, nodes=3))


def configure(one: state.Node) -> Path:
    """Write the node's files, and return its store of images."""
    node.write_configuration(one)
    text = (one.folder / "containerd.toml").read_text()
    return Path(text.partition('root = "')[2].partition('"')[0])


def test_every_node_has_a_store_that_starts_with_the_images_of_the_first(cluster: State) -> None:
    first, second, third = cluster.nodes
    store = configure(first)
    assert store.is_relative_to(places.cache_home())
    fresh = configure(second)
    assert not fresh.exists()
    for file in (DATABASE, LAYER):
        (store / file).parent.mkdir(parents=True)
        (store / file).write_text("as imported")
    copy = configure(third)
    assert len({store, fresh, copy}) == 3
    assert (copy / LAYER).samefile(store / LAYER)
    (copy / DATABASE).write_text("of the third node")
    assert (store / DATABASE).read_text() == "as imported"


def test_a_store_of_images_is_kept(cluster: State) -> None:
    first, second, _ = cluster.nodes
    store = configure(first)
    copy = store.with_name(f"{store.name}-{second.name}")
    for folder, text in ((store, "of the first"), (copy, "of the second")):
        (folder / LAYER).parent.mkdir(parents=True)
        (folder / LAYER).write_text(text)
    assert configure(second) == copy
    assert (copy / LAYER).read_text() == "of the second"
