"""Strategies of Hypothesis for malformed JSON: wrong types, extreme numbers, deep nesting, bad UTF-8."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from torchrun_api.json import JsonObject

# Not JSON, or more than Python's parser accepts.
_RAW = (
    *(b"1e400", b"9" * 400, b"18446744073709551616", b"NaN", b"01", b"1.", b"+1", b"0x10"),
    *(b"[" * 5000, b"[" * 900 + b"]" * 900, b'{"a":' * 5000 + b"1" + b"}" * 5000),
    *(b'"\xff"', b'"\xed\xa0\x80"', b'"\\ud800"', b'"\x00"'),
)
_PLACE = "@"
_EXTREMES = (
    *(-1, 2**31, -(2**63), 2**63 - 1, 2**64, 10**40, 1e308, "", "x" * 70_000),
    *("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-01-02T03:04:05", "yesterday"),
)
values = st.sampled_from(_EXTREMES) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
"""Any value of JSON, often an extreme one."""


@st.composite
def texts(draw: st.DrawFn, valid: JsonObject) -> bytes:
    """The object as JSON, in which up to three values, anywhere, have become others."""
    whole = [json.loads(json.dumps(valid))]
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(list(_places(whole))))
        container[key] = draw(values | st.just(_PLACE))
    text = json.dumps(whole[0]).encode()
    return text.replace(f'"{_PLACE}"'.encode(), draw(st.sampled_from(_RAW)))


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within this one, with the keys or positions of its values."""
    for key, value in list(
        container.items() if isinstance(container, dict) else enumerate(container)
    ):
        yield container, key
        if isinstance(value, dict | list):
            yield from _places(value)
