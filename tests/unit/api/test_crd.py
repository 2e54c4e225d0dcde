"""The generated CRDs follow the types and are valid for the API server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from torchrun_api.generate.crd import (
    DEFINITIONS,
    Definition,
    custom_resource_definition,
    generated_files,
    main,
)
from torchrun_api.generate.reference import _tables
from torchrun_api.generate.structural import NOT_SUPPORTED, structural
from torchrun_api.json import JsonObject
from torchrun_api.kinds.reliability import FailureRule, QueuePolicy
from torchrun_api.kinds.schema import RemovedField

ROOT = Path(__file__).parents[3]
CLIENT_SIDE_APPLY_LIMIT = 262_144

definitions = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.kind.kind)


def schema(definition: Definition) -> dict[str, Any]:
    crd: dict[str, Any] = custom_resource_definition(definition)
    openapi: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return openapi


def fields(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from fields(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield f"{path}[]", node[key]
            yield from fields(node[key], f"{path}[]")


COMMITTED = generated_files(ROOT / "manifests/crd", ROOT / "docs/api-reference.md")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_the_committed_file_is_the_generated_one(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == COMMITTED[path], (
        "run: python -m torchrun_api.generate.crd"
    )


@definitions
def test_it_fits_client_side_apply(definition: Definition) -> None:
    assert len(json.dumps(custom_resource_definition(definition))) < CLIENT_SIDE_APPLY_LIMIT


@definitions
def test_every_field_is_described(definition: Definition) -> None:
    silent = [
        path
        for path, node in fields(schema(definition))
        if not path.endswith("[]") and path != ".metadata" and not node.get("description")
    ]
    assert silent == []


@definitions
def test_every_value_in_a_spec_is_bounded(definition: Definition) -> None:
    bounds = {
        "string": "maxLength",
        "array": "maxItems",
        "integer": "maximum",
        "object": "maxProperties",
    }
    unbounded = []
    for path, node in fields(schema(definition)["properties"]["spec"]):
        kind = node.get("type", "string")
        closed = "enum" in node or "properties" in node
        embedded = kind == "object" and node.get("x-kubernetes-preserve-unknown-fields")
        if node.get("description", "").startswith(NOT_SUPPORTED):
            continue
        if kind != "boolean" and not closed and not embedded and bounds[kind] not in node:
            unbounded.append(path)
    assert unbounded == []


@definitions
def test_status_has_no_defaults(definition: Definition) -> None:
    status = schema(definition)["properties"]["status"]
    assert [path for path, node in fields(status) if "default" in node] == []


@definitions
def test_rules_of_the_spec_do_not_refuse_a_status(definition: Definition) -> None:
    status = schema(definition)["properties"]["status"]
    assert [path for path, field in fields(status) if "x-kubernetes-validations" in field] == []


def test_a_status_may_have_the_reliability_of_the_queue() -> None:
    """Defaults are omitted on the wire, so no such field may be required."""
    policy = QueuePolicy(rules=(FailureRule(exit_codes=(3,)),))
    (rule,) = msgspec.to_builtins(policy)["rules"]
    (job,) = (each for each in DEFINITIONS if each.kind.kind == "TorchrunJob")
    by_path = dict(fields(schema(job)["properties"]["status"]))
    assert {*by_path[".queuePolicy.rules[]"].get("required", ())} <= {*rule}


@definitions
def test_keys_of_list_maps_are_required_or_have_a_default(definition: Definition) -> None:
    """Otherwise the API server refuses the CRD."""
    for path, field in fields(schema(definition)):
        for key in field.get("x-kubernetes-list-map-keys", ()):
            item = field["items"]
            has_default = "default" in item["properties"][key]
            assert has_default or key in item.get("required", ()), f"{path}[].{key}"


@definitions
def test_print_columns_name_fields_of_the_schema(definition: Definition) -> None:
    paths = {path for path, _ in fields(schema(definition))} | {".metadata.creationTimestamp"}
    assert {column.path for column in definition.columns} <= paths


def at(definition: Definition, path: str) -> JsonObject:
    return dict(fields(schema(definition)))[path]


def test_shapes() -> None:
    job, queue = DEFINITIONS
    assert schema(job)["required"] == ["spec"]
    assert schema(job)["properties"]["spec"]["required"] == ["jobQueue", "command"]
    assert at(job, ".spec.launcher")["default"] == "auto"
    assert at(job, ".spec.launcher")["enum"] == ["auto", "none", "torchrun"]
    assert at(job, ".spec.env")["x-kubernetes-list-map-keys"] == ["name"]
    assert at(job, ".spec.scheduling.tolerations")["x-kubernetes-list-type"] == "atomic"
    assert at(job, ".status.conditions")["x-kubernetes-list-map-keys"] == ["type"]
    assert at(job, ".status.startTime") == {
        "type": "string",
        "format": "date-time",
        "description": "Time at which all pods first ran.",
    }
    command = at(job, ".spec.command")
    assert "type" not in command
    assert command["x-kubernetes-preserve-unknown-fields"] is True
    assert (command["minLength"], command["minItems"]) == (1, 1)
    memory = at(queue, ".spec.nodeResources.memory")
    assert memory["x-kubernetes-int-or-string"] is True
    assert "type" not in memory
    assert "x-kubernetes-preserve-unknown-fields" not in memory
    assert at(queue, ".spec.storage.workspace.retain")["default"] is False
    assert "default" not in at(queue, ".spec.image")


class Room(msgspec.Struct):
    """A room."""

    REMOVED: ClassVar = (
        RemovedField("lamp", "string", "Use light."),
        RemovedField("beds", "objects", "Use sofas."),
    )
    light: str = ""


def test_a_removed_field_is_refused_with_what_to_use_instead() -> None:
    room = structural(msgspec.inspect.type_info(Room))
    properties: Any = room["properties"]
    assert properties["lamp"] == {
        "type": "string",
        "description": "Not supported. Use light.",
        "x-kubernetes-validations": [{"rule": "false", "message": "Use light."}],
    }
    assert properties["beds"]["type"] == "array"
    assert "lamp" not in "".join(_tables("spec", room))
    in_status: Any = structural(msgspec.inspect.type_info(Room), defaults=False)["properties"]
    assert [*in_status] == ["light"]


def test_check_names_what_is_out_of_date_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "crd"), "--reference", str(tmp_path / "docs" / "api.md")]
    assert main([*arguments, "--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    stale = tmp_path / "crd" / "torchrunjobs.torchrun.ai.yaml"
    stale.write_text("stale")
    capsys.readouterr()
    assert main([*arguments, "--check"]) == 1
    assert capsys.readouterr().err.startswith(f"{stale} is out of date")
    assert stale.read_text() == "stale"
