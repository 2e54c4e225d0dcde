"""JSON as Python values: the type of every object that is sent, merged or printed."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
    )
else:
    from typing import Any as JsonValue  # msgspec decodes JSON of any shape by this name

JsonObject: TypeAlias = dict[str, JsonValue]


def object_at(body: JsonObject, name: str) -> JsonObject:
    """The object under a name, the very one; an empty one where there is none."""
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def objects_at(body: JsonObject, name: str) -> list[JsonObject]:
    """The objects of the list under a name; none where there is no list."""
    value = body.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
