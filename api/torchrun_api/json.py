"""JSON as Python values: the type of every object that is sent, merged or printed."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
    )
else:
    from typing import Any as JsonValue  # msgspec decodes JSON of any shape by this name

JsonObject: TypeAlias = dict[str, JsonValue]
