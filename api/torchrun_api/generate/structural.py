"""From msgspec types to the structural schema of a CustomResourceDefinition.

Shapes, bounds, enums and docstrings are read from the types. Everything else is in
`Meta(description=..., extra_json_schema=...)` and in the class variables RULES, REQUIRED and
REMOVED.

https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

from collections.abc import Iterable, Mapping
from inspect import cleandoc

from msgspec import inspect

from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.schema import RemovedField, Rule

# The description of a removed field begins with it.
NOT_SUPPORTED = "Not supported."

_BOUNDS: Mapping[type[inspect.Type], Mapping[str, str]] = {
    inspect.StrType: {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"},
    inspect.IntType: {"ge": "minimum", "le": "maximum"},
    inspect.FloatType: {"ge": "minimum", "le": "maximum"},
    inspect.VarTupleType: {"min_length": "minItems", "max_length": "maxItems"},
    inspect.DictType: {"min_length": "minProperties", "max_length": "maxProperties"},
}


def structural(shape: inspect.Type, *, defaults: bool = True) -> JsonObject:
    """The schema of one type. defaults: False for a status, which only the controller writes.

    A status has no defaults, and no rules of the spec that its values were copied from: a status
    that the API server rejects could never be written.

    Raises TypeError for a type that a structural schema cannot express.
    """
    match shape:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            schema = _with_keys(structural(inner, defaults=defaults) | (extra or {}))
            if "x-kubernetes-int-or-string" in schema:
                schema.pop("x-kubernetes-preserve-unknown-fields", None)
            return schema
        case inspect.UnionType(types=types):
            return _union([t for t in types if not isinstance(t, inspect.NoneType)], defaults)
        case inspect.StructType():
            return struct(shape, defaults=defaults)
        case inspect.LiteralType(values=values):
            return {"type": "string", "enum": list(values)}
        case inspect.StrType():
            return {"type": "string"} | _bounds(shape)
        case inspect.IntType():
            return {"type": "integer", "format": "int64"} | _bounds(shape)
        case inspect.FloatType():
            return {"type": "number"} | _bounds(shape)
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.DateTimeType():
            return {"type": "string", "format": "date-time"}
        case inspect.VarTupleType(item_type=item):
            array = {"type": "array", "x-kubernetes-list-type": "atomic"} | _bounds(shape)
            return array | {"items": structural(item, defaults=defaults)}
        case inspect.DictType(value_type=inspect.AnyType()):
            return {"type": "object"}  # Embedded: its annotation keeps unknown fields
        case inspect.DictType(value_type=value):
            values_schema = structural(value, defaults=defaults)
            return {"type": "object"} | _bounds(shape) | {"additionalProperties": values_schema}
        case _:
            raise TypeError(f"a structural schema cannot hold {shape}")


def struct(shape: inspect.StructType, *, defaults: bool = True) -> JsonObject:
    """An object with its docstring, its properties, its required fields and its CEL rules."""
    required = [f.encode_name for f in shape.fields if f.required]
    required += getattr(shape.cls, "REQUIRED", ()) if defaults else ()
    properties: JsonObject = {
        f.encode_name: _property(f, defaults=defaults and f.encode_name not in required)
        for f in shape.fields
        if not f.encode_name.startswith("__")
    }
    if defaults:
        properties |= {field.name: _refused(field) for field in getattr(shape.cls, "REMOVED", ())}
    schema: JsonObject = {
        "description": cleandoc(shape.cls.__doc__ or ""),
        "type": "object",
        "properties": properties,
    }
    if required:
        schema["required"] = list(required)
    if defaults and (rules := validations(getattr(shape.cls, "RULES", ()))):
        schema["x-kubernetes-validations"] = rules
    return schema


def _with_keys(schema: JsonObject) -> JsonObject:
    """Require the keys of a list map, as the API server demands of a CRD."""
    keys, items = schema.get("x-kubernetes-list-map-keys"), schema.get("items")
    if not isinstance(keys, list) or not isinstance(items, dict):
        return schema
    required = items.get("required")
    required_fields = required if isinstance(required, list) else []
    missing: list[JsonValue] = [key for key in keys if key not in required_fields]
    return schema | {"items": items | {"required": [*required_fields, *missing]}}


def validations(rules: Iterable[Rule]) -> list[JsonValue]:
    """CEL rules as written in `x-kubernetes-validations`."""
    entries: list[JsonValue] = []
    for rule in rules:
        entry: JsonObject = {"rule": rule.rule, "message": rule.message}
        if rule.field:
            entry["fieldPath"] = rule.field
        entries.append(entry)
    return entries


def _refused(field: RemovedField) -> JsonObject:
    """The schema of a field that no object may have."""
    unknown: JsonObject = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    shape: JsonObject
    match field.type:
        case "objects":
            shape = {"type": "array", "items": unknown}
        case "object":
            shape = unknown
        case _:
            shape = {"type": field.type}
    rule = Rule("false", field.instead)
    return {
        **shape,
        "description": f"{NOT_SUPPORTED} {field.instead}",
        "x-kubernetes-validations": validations((rule,)),
    }


def _property(field: inspect.Field, *, defaults: bool) -> JsonObject:
    schema = structural(field.type, defaults=defaults)
    default = field.default
    # An empty default means "not set"; on the wire that is the absence of the field.
    if defaults and (isinstance(default, bool | int) or (isinstance(default, str) and default)):
        schema["default"] = default
    return schema


def _union(types: list[inspect.Type], defaults: bool) -> JsonObject:
    if len(types) == 1:
        return structural(types[0], defaults=defaults)
    # A structural schema has one type or none. Bounds apply only to values of their own type,
    # so those of all members can be combined.
    schema: JsonObject = {"x-kubernetes-preserve-unknown-fields": True}
    for member in types:
        schema |= _bounds(member)
    return schema


def _bounds(shape: inspect.Type) -> JsonObject:
    names = _BOUNDS.get(type(shape), {})
    return {
        keyword: bound
        for attribute, keyword in names.items()
        if (bound := getattr(shape, attribute)) is not None
    }
