"""Values of the wrong type, and places for them in JSON."""

import random
from collections.abc import Callable

from torchrun_api.json import JsonObject, JsonValue


def nested(depth: int) -> JsonValue:
    """Objects in objects."""
    value: JsonValue = {}
    for _ in range(depth):
        value = {"a": value}
    return value


_CONTAINERS: list[JsonValue] = [
    [],
    [None],
    [[]],
    [{}],
    {},
    {"": None},
    {"a": {"b": {"c": []}}},
    ["x"] * 2000,
    {str(number): "x" for number in range(500)},
]
ANY: tuple[JsonValue, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, -(2**63), 2**64, 10**40, 1e308, -1e-308),
    *("", " ", "\x00", "null", "💥\u202e", "é" * 300, "x" * 70_000, "../../etc", "{{.}}", "%s%n"),
    *("2026-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "yesterday"),
    "2026-01-02T03:04:05",
    *_CONTAINERS,
)
# As text, because some are not JSON, and Python cannot format the others.
NUMBERS = (
    *("1e400", "-1e400", "9" * 400, "-" + "9" * 400, "18446744073709551616", "-0", "0.1e-400"),
    *("NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "0x10", "1e", "9223372036854775808"),
)
BOMBS = (
    *(b"[" * 100_000, b"[" * 5000 + b"]" * 5000, b'{"a":' * 5000 + b"1" + b"}" * 5000),
    *(b'{"a":' * 50_000, b"[" * 900 + b"]" * 900, b'[{"a":' * 1500 + b"1" + b"}]" * 1500),
)


def anywhere_else(chance: random.Random) -> JsonValue:
    """Any value at all."""
    return chance.choice(ANY)


def changed(
    chance: random.Random,
    value: JsonObject,
    other: Callable[[random.Random], JsonValue],
    times: int,
) -> JsonObject:
    """A copy in which `times` values, anywhere, are replaced by `other` ones or removed."""
    copy = {key: _copy(each) for key, each in value.items()}
    for _ in range(times):
        container, index = _place(chance, copy)
        new = [_copy(other(chance))] if chance.random() < 0.85 else []
        if isinstance(container, list):
            container[index : index + 1] = new
            continue
        key = list(container)[index] if container else "spec"
        if new:
            container[key] = new[0]
        else:
            container.pop(key, None)
    return copy


def _copy(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _place(chance: random.Random, value: JsonObject) -> tuple[JsonObject | list[JsonValue], int]:
    """A container within the value, and the position of one of its entries."""
    container: JsonObject | list[JsonValue] = value
    while container:
        index = chance.randrange(len(container))
        entries = list(container.values()) if isinstance(container, dict) else container
        below = entries[index]
        if not isinstance(below, dict | list) or not below or chance.random() < 0.2:
            return container, index
        container = below
    return value, chance.randrange(max(len(value), 1))
