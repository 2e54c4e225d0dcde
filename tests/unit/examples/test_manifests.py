"""The example manifests have only known fields with valid values."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_runtime.launch.command import decide

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.rglob("*.yaml"))
GROUP = "torchrun.ai/v1alpha1"
Document = dict[str, Any]
TYPES: dict[str, type[TorchrunJob | TorchrunQueue]] = {
    "TorchrunJob": TorchrunJob,
    "TorchrunQueue": TorchrunQueue,
}


def documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text()))


@cache
def schemas() -> dict[str, Document]:
    """Kind to the openAPIV3Schema of its CRD."""
    found: dict[str, Document] = {}
    for path in (ROOT / "manifests" / "crd").glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "CustomResourceDefinition":
                spec = document["spec"]
                found[spec["names"]["kind"]] = spec["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def unknown_fields(value: object, schema: Document, path: str = "") -> Iterator[str]:
    """The paths in `value` that are not in `schema`."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema.get("items", {}), f"{path}[{index}]")
    elif isinstance(value, dict):
        others = schema.get("additionalProperties")
        for field, inner in value.items():
            below = schema.get("properties", {}).get(field, others)
            if below is None:
                yield f"{path}.{field}"
            else:
                yield from unknown_fields(inner, below, f"{path}.{field}")


def of_kind(path: Path, kind: str) -> list[Document]:
    return [found for found in documents(path) if found["kind"] == kind]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_decode_strictly(path: Path) -> None:
    schema = schemas()
    assert documents(path)
    for document in documents(path):
        if document["apiVersion"] != GROUP:
            continue
        kind = str(document["kind"])
        decoded = msgspec.convert(document, TYPES[kind])
        assert decoded.metadata.name
        spec = schema[kind]["properties"]["spec"]
        assert list(unknown_fields(document["spec"], spec, "spec")) == []
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}


def test_an_unknown_field_is_found() -> None:
    spec = schemas()["TorchrunJob"]["properties"]["spec"]
    wrong = {"numNode": 1, "distributed": {"backends": "gloo"}, "env": [{"nam": "A"}]}
    assert list(unknown_fields(wrong, spec, "spec")) == [
        "spec.numNode",
        "spec.distributed.backends",
        "spec.env[0].nam",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_names_a_queue_of_its_file_or_the_shared_ones(path: Path) -> None:
    queues = of_kind(path, "TorchrunQueue") + of_kind(EXAMPLES / "queues.yaml", "TorchrunQueue")
    names = {queue["metadata"]["name"] for queue in queues}
    for job in of_kind(path, "TorchrunJob"):
        assert job["spec"]["jobQueue"] in names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ranks_are_started_once(path: Path) -> None:
    for job in of_kind(path, "TorchrunJob"):
        command = job["spec"]["command"]
        starts_itself = "torchrun" in command
        run = decide(command, job["spec"].get("launcher", "auto"), nnodes="", python="python3")
        assert run.under_torchrun != starts_itself, run.why


def test_all_examples_fit_in_one_namespace() -> None:
    names = [
        (found["apiVersion"], found["kind"], found["metadata"]["name"])
        for path in FILES
        for found in documents(path)
    ]
    assert len(names) == len(set(names)), "two examples would overwrite each other"


def test_the_queues_of_the_guide_are_unchanged() -> None:
    guide = ROOT / "tests" / "fixtures" / "mission" / "queues-dev-and-prod.yaml"
    assert of_kind(EXAMPLES / "several-queues.yaml", "TorchrunQueue") == documents(guide)


def test_the_index_names_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text()
    for path in FILES:
        entry = path if path.parent == EXAMPLES else path.parent
        assert f"]({entry.relative_to(EXAMPLES)}" in index, f"README.md does not link {entry}"
