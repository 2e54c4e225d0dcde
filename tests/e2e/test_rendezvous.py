"""Rendezvous backends. All other tests use static, the default for a fixed size."""

from pathlib import Path

import pytest

from e2e.manifests import job, queue
from e2e.space import Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import TORCHRUN_JOBS
from torchrun_cluster import images

SUM = """\
import os, torch, torch.distributed as d
d.init_process_group("gloo")
ones = torch.ones(1)
d.all_reduce(ones)
print("rank", d.get_rank(), "sum", int(ones), "backend", os.environ.get("PET_RDZV_BACKEND"))
d.destroy_process_group()
"""
ETCD = """\
ARG BASE=localhost/torchrun-torch
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends etcd-server \\
 && pip install --no-cache-dir --break-system-packages python-etcd
"""
RESOURCES = {"cpus": "250m", "memory": "1500Mi"}


def run_sum(space: Space, distributed: JsonObject) -> str:
    """Run an all-reduce over two nodes. Returns both logs."""
    space.apply(
        job(
            *("sum", "torch", ["python3", "-c", SUM], 2),
            launcher="torchrun",
            distributed=distributed,
        )
    )
    with space.history(TORCHRUN_JOBS) as jobs:
        ended = jobs.until(
            lambda j: j.get("status", {}).get("phase") in ("Succeeded", "Failed") and j, 120
        )
    assert ended["status"]["phase"] == "Succeeded", ended["status"]
    return space.cluster.kubectl("torchrun", "logs", "sum", "-n", space.name).stdout


@pytest.mark.long
def test_c10d(space: Space):
    space.apply(queue("torch", space.cluster.trainer, nodeResources=RESOURCES))
    log = run_sum(space, {"rdzvBackend": "c10d"})
    assert "rank 0 sum 2 backend c10d" in log
    assert "rank 1 sum 2 backend c10d" in log


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_etcd_v2(space: Space, tmp_path: Path):
    if space.cluster.local is None:
        pytest.skip("needs an image of its own, which only the local cluster can be given")
    (tmp_path / "Dockerfile").write_text(ETCD)
    image = "localhost/torchrun-etcd:e2e"
    archive = images.build(
        tmp_path / "Dockerfile", tmp_path, image, {"BASE": "localhost/torchrun-torch"}
    )
    space.cluster.local.load_image(archive)
    start = "exec etcd --enable-v2 --listen-client-urls http://0.0.0.0:2379"
    start += " --advertise-client-urls http://etcd:2379 --data-dir /tmp/etcd"
    space.kubectl(
        *("run", "etcd", f"--image={image}", "--image-pull-policy=Never", "--port=2379"),
        *("--expose", "--", "sh", "-c", start),
    )
    space.wait("pod/etcd", "condition=Ready")
    space.apply(queue("torch", image, nodeResources=RESOURCES))
    log = run_sum(space, {"rdzvBackend": "etcd-v2", "rdzvEndpoint": "etcd:2379"})
    assert "rank 0 sum 2 backend etcd-v2" in log
    assert "rank 1 sum 2 backend etcd-v2" in log
