"""The example manifests on a real API server."""

from pathlib import Path

import pytest

from torchrun_cluster import LocalCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.yaml"))


NAMESPACE = "examples"


@pytest.fixture(scope="module")
def empty(crds: LocalCluster) -> LocalCluster:
    """A namespace without jobs of other tests."""
    crds.kubectl("create", "namespace", NAMESPACE)
    return crds


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_applies(empty: LocalCluster, path: Path) -> None:
    answer = empty.kubectl(
        *("apply", "-n", NAMESPACE, "--dry-run=server", "--validate=strict", "-f", str(path)),
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == "", "the API server warns"
