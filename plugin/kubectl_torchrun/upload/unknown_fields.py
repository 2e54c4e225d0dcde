"""Fields of a file that its kind does not have. With a cluster, the API server refuses them."""

import difflib
from collections.abc import Iterator

from msgspec import inspect

from kubectl_torchrun.errors import UsageProblem
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.schema import RemovedField


def check_fields(file: str, body: JsonObject, kind: type) -> None:
    """Raise UsageProblem for the first field below `spec` that the struct `kind` does not have."""
    shape = inspect.type_info(kind)
    assert isinstance(shape, inspect.StructType)
    spec = next(field.type for field in shape.fields if field.encode_name == "spec")
    problem = next(_unknown(body.get("spec"), spec, "spec"), None)
    if problem is not None:
        raise UsageProblem(f"{file}: {problem}")


def _unknown(value: JsonValue, shape: inspect.Type, path: str) -> Iterator[str]:
    """Yield what is wrong with the fields of a value, depth first."""
    match value, shape:
        case _, inspect.Metadata():
            yield from _unknown(value, shape.type, path)
        case _, inspect.UnionType():
            of_kind = inspect.StructType if isinstance(value, dict) else inspect.VarTupleType
            for each in shape.types:
                if isinstance(each, of_kind):
                    yield from _unknown(value, each, path)
        case list(), inspect.VarTupleType() | inspect.ListType():
            for number, item in enumerate(value):
                yield from _unknown(item, shape.item_type, f"{path}[{number}]")
        case dict(), inspect.DictType():
            for name, item in value.items():
                yield from _unknown(item, shape.value_type, f"{path}.{name}")
        case dict(), inspect.StructType():
            fields = {field.encode_name: field.type for field in shape.fields}
            for name, item in value.items():
                if name in fields:
                    yield from _unknown(item, fields[name], f"{path}.{name}")
                else:
                    yield _describe(name, path, shape, list(fields))
        case _:
            pass


def _describe(name: str, path: str, shape: inspect.StructType, known: list[str]) -> str:
    removed: tuple[RemovedField, ...] = getattr(shape.cls, "REMOVED", ())
    for field in removed:
        if field.name == name:
            return f"{path}.{name}: {field.instead}"
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{path} has no field {name}.{hint}"
