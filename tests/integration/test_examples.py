"""The example manifests on a real API server."""

from pathlib import Path

import pytest

from torchrun_cluster import LocalCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_applies(crds: LocalCluster, path: Path) -> None:
    answer = crds.kubectl(
        *("apply", "--dry-run=server", "--validate=strict", "-f", str(path)), check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == "", "the API server warns"
