"""The YAML of the pages uses fields of the CRDs, with values that the types accept."""

from functools import reduce
from typing import Any

import msgspec
import pytest
import yaml

from pages import Block, blocks, pages
from unit.examples.test_manifests import GROUP, TYPES, schemas, unknown_fields

# What a fragment needs beside it.
REQUIRED: dict[str, dict[str, Any]] = {
    "TorchrunJob": {"jobQueue": "gpu", "numNodes": 1, "command": "python train.py"},
    "TorchrunQueue": {"image": "pytorch/pytorch"},
}
FOUND = [
    block
    for page in pages()
    for block in blocks(page)
    if block.language == "yaml" and block.mark != "not run"
]


def objects(block: Block) -> list[dict[str, Any]]:
    """The objects of a block; a fragment within the object that its comment names."""
    bodies = [body for body in yaml.safe_load_all(block.text) if body]
    if block.mark != "part of":
        return bodies
    kind, *path = block.argument.split(".")
    (fragment,) = bodies
    whole = reduce(lambda inner, name: {name: inner}, reversed(path), fragment)
    spec = {**REQUIRED[kind], **whole["spec"]}
    return [{"apiVersion": GROUP, "kind": kind, "metadata": {"name": "part"}, "spec": spec}]


@pytest.mark.parametrize("block", FOUND, ids=str)
def test_examples_decode_strictly(block: Block) -> None:
    for body in objects(block):
        if body["apiVersion"] == GROUP:
            msgspec.convert(body, TYPES[body["kind"]])
            schema = schemas()[body["kind"]]["properties"]["spec"]
            assert list(unknown_fields(body["spec"], schema, "spec")) == []
