"""JSON as Python values: the type of all objects that are sent, merged or printed."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
    )
else:
    from typing import Any as JsonValue  # msgspec decodes JSON of any shape by this name

JsonObject: TypeAlias = dict[str, JsonValue]


def object_at(body: JsonObject, name: str) -> JsonObject:
    """The object under a name, not a copy; an empty one if it is missing."""
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def objects_at(body: JsonObject, name: str) -> list[JsonObject]:
    """The objects of the list under a name; empty if there is no list."""
    value = body.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
