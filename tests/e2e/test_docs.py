"""The commands of the pages, unchanged and in order, in one shell for each page.

Each page starts with the queues `cpu` and `gpu` (with a fake extended resource as GPUs), a running
job `train` of two nodes, and a directory `my-project`.
"""

import json
import subprocess
from pathlib import Path

import pytest

from e2e.manifests import queue
from e2e.space import Space
from e2e.test_plugin import plugin, project
from pages import ROOT, Block, blocks, pages

GPU = "example.com/gpu"
MINUTES = 8
TRAIN = """
import os, sys, time
print("rank", os.environ["RANK"], sys.argv[1:], flush=True)
time.sleep(600 if "--for-long" in sys.argv else 0)
"""
RUN = ("run", "cluster")
FOUND = {
    str(page.relative_to(ROOT)): found
    for page in pages()
    if (found := [block for block in blocks(page) if (block.mark, block.argument) == RUN])
}

QUICK = "docs/quickstart.md"
"""The page that `make test` runs, too."""

pytestmark = pytest.mark.timeout(60 * MINUTES, func_only=True)


def script(found: list[Block], namespace: str) -> str:
    """All blocks of a page, with the namespace of the test instead of the demo's."""
    steps = [f"echo '>>> {block}' >&2\n{block.script()}" for block in found]
    return "set -eux -o pipefail\n" + "\n".join(steps).replace("torchrun-demo", namespace)


def kubeconfig(space: Space, directory: Path) -> Path:
    """A kubeconfig with the namespace of the test."""
    config = json.loads(
        space.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json").stdout
    )
    for context in config["contexts"]:
        context["context"]["namespace"] = space.name
    path = directory / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def gpus(space: Space) -> None:
    """Fake GPUs on every node, as many as a job of the pages requests."""
    names = space.cluster.kubectl("get", "nodes", "-o", "name").stdout.split()
    patch = json.dumps({"status": {"capacity": {GPU: "64"}, "allocatable": {GPU: "64"}}})
    for name in names:
        words = ("--subresource=status", "--type=merge", "-p", patch)
        space.cluster.kubectl("patch", name, *words)


@pytest.mark.parametrize(
    "page",
    [QUICK, *(pytest.param(page, marks=pytest.mark.long) for page in FOUND if page != QUICK)],
)
def test_a_page(space: Space, gpus: None, tmp_path: Path, page: str) -> None:
    image = space.cluster.trainer
    one = {"backend": "gloo", "nprocPerNode": 1}
    resources = {"cpus": "50m", "memory": "1Gi"}
    gpu = {**resources, "gpus": 8, "gpuResourceName": GPU}
    space.apply(
        queue("cpu", image, nodeResources=resources),
        queue("gpu", image, nodeResources=gpu, distributed=one),
    )
    desk = tmp_path / "desk"
    mine = desk / "my-project"
    mine.mkdir(parents=True)
    for directory in (desk, mine):
        project(directory, train_py=TRAIN, torchrun_toml='queue = "cpu"\n')
    words = ("submit", "--queue", "cpu", "--nodes", "2", "--name", "train", "--no-follow")
    code, _, err = plugin(space, mine, *words, "python train.py --for-long")
    assert code == 0, err
    space.wait_phase("train", "Running")
    ended = subprocess.run(
        ["bash", "-c", script(FOUND[page], space.name)],
        cwd=desk,
        env={**space.cluster.environment, "KUBECONFIG": str(kubeconfig(space, tmp_path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 * MINUTES,
        check=False,
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-3000:]
