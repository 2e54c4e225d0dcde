"""The YAML of the pages applies to a real API server."""

import json
from functools import reduce

import pytest
import yaml

from pages import Block, blocks, pages
from torchrun_api.json import JsonObject
from torchrun_cluster import LocalCluster

FOUND = [
    block
    for page in pages()
    for block in blocks(page)
    if block.language == "yaml" and block.mark != "not run"
]
# Fields that complete a fragment to a whole object.
WHOLE: dict[str, JsonObject] = {
    "TorchrunJob": {"jobQueue": "gpu", "numNodes": 1, "command": "python train.py"},
    "TorchrunQueue": {"image": "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"},
}
NAMESPACE = "pages"


def objects(block: Block) -> list[JsonObject]:
    """The objects of the block; a fragment is completed by the object that its comment names."""
    bodies: list[JsonObject] = [body for body in yaml.safe_load_all(block.text) if body]
    if block.mark != "part of":
        return bodies
    kind, *path = block.argument.split(".")
    (part,) = bodies
    around: JsonObject = reduce(lambda inner, name: {name: inner}, reversed(path), part)
    spec = around["spec"]
    assert isinstance(spec, dict)
    head: JsonObject = {"apiVersion": "torchrun.ai/v1alpha1", "kind": kind}
    return [{**head, "metadata": {"name": "part"}, "spec": {**WHOLE[kind], **spec}}]


@pytest.fixture(scope="module")
def empty(crds: LocalCluster) -> LocalCluster:
    crds.kubectl("create", "namespace", NAMESPACE)
    return crds


@pytest.mark.parametrize("block", FOUND, ids=str)
def test_applies(empty: LocalCluster, block: Block) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": objects(block)}
    answer = empty.kubectl(
        *("apply", "-n", NAMESPACE, "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin=json.dumps(listed),
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == "", "the API server warns"
