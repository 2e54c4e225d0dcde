"""One real control plane for all integration tests that do not break it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_cluster import LocalCluster, Size

CRDS = Path(__file__).parents[2] / "manifests" / "crd"
IN_FORCE_WITHIN = 30.0

NO_COMMAND = """
apiVersion: torchrun.ai/v1alpha1
kind: TorchrunJob
metadata: {name: probe}
spec: {jobQueue: none, numNodes: 1, command: 5}
"""


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """API server, etcd and controller-manager; no nodes, so pods stay Pending."""
    with LocalCluster(name=f"test-{os.getpid()}", size=Size.CONTROL_PLANE) as running:
        yield running


@pytest.fixture(scope="session")
def crds(cluster: LocalCluster) -> LocalCluster:
    """The same control plane with the kinds served and the admission policy in force."""
    cluster.kubectl("apply", "-f", str(CRDS))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    # Neither discovery nor an admission policy says when it has reached the API server's memory.
    deadline = time.monotonic() + IN_FORCE_WITHIN
    while True:
        refusal = cluster.kubectl(
            "create", "--dry-run=server", "-f", "-", stdin=NO_COMMAND, check=False
        ).stderr
        if "ValidatingAdmissionPolicy" in refusal:
            return cluster
        assert time.monotonic() < deadline, f"the CRDs are not in force: {refusal}"
        time.sleep(0.1)
