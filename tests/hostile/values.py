"""Values of the wrong kind, and places in JSON to put them."""

import random
from collections.abc import Callable

from torchrun_api.json import JsonObject, JsonValue


def nested(depth: int) -> JsonValue:
    """Objects in objects."""
    value: JsonValue = {}
    for _ in range(depth):
        value = {"a": value}
    return value


ANY: tuple[JsonValue, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, -(2**63), 2**64, 10**40, 1e308, -1e-308),
    *("", " ", "\x00", "null", "💥\u202e", "é" * 300, "x" * 70_000, "../../etc", "{{.}}", "%s%n"),
    *("2026-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "yesterday"),
    "2026-01-02T03:04:05",
    *([], [None], [[]], [{}], {}, {"": None}, {"a": {"b": {"c": []}}}, ["x"] * 2000),
    dict.fromkeys(map(str, range(500)), "x"),
)
# As text, since not all of them are JSON and Python does not write the others.
NUMBERS = (
    *("1e400", "-1e400", "9" * 400, "-" + "9" * 400, "18446744073709551616", "-0", "0.1e-400"),
    *("NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "0x10", "1e", "9223372036854775808"),
)
BOMBS = (
    *(b"[" * 100_000, b"[" * 5000 + b"]" * 5000, b'{"a":' * 5000 + b"1" + b"}" * 5000),
    *(b'{"a":' * 50_000, b"[" * 900 + b"]" * 900, b'[{"a":' * 1500 + b"1" + b"}]" * 1500),
)
GONE = object()
"""In the place of a value: it shall not be there."""


def anywhere_else(chance: random.Random) -> JsonValue:
    """Any value at all."""
    return chance.choice(ANY)


def changed(
    chance: random.Random,
    value: JsonObject,
    other: Callable[[random.Random], object],
    times: int,
) -> JsonObject:
    """A copy in which so many values, anywhere, are others or gone."""
    copy = _copy(value)
    for _ in range(times):
        place, key = _place(chance, copy)
        new = other(chance) if chance.random() < 0.85 else GONE
        if new is not GONE:
            place[key] = _copy(new)
        elif isinstance(place, dict):
            place.pop(key, None)
        else:
            del place[key]
    return copy


def _copy(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _place(chance: random.Random, value: JsonObject) -> tuple[JsonValue, str | int]:
    """A container within the value, and a key or index of it."""
    at: JsonValue = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return value, chance.choice(list(value) or ["spec"])
        key = chance.choice(keys)
        below = at[key]
        if not isinstance(below, dict | list) or not below or chance.random() < 0.2:
            return at, key
        at = below
