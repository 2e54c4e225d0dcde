"""Serialization of arguments and results."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_sdk import serialization
from torchrun_sdk.serialization import OtherPython, Packed, Unpackable, UnwantedFormat, pack, unpack

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(plain, st.sampled_from(["json", "pickle"]))
def test_plain_values_arrive_unchanged(value: object, format: str) -> None:
    arrived = unpack(pack(value, format, "x"), [format])
    assert arrived == value
    assert type(arrived) is type(value)


def test_nan_and_tuples_arrive_unchanged() -> None:
    assert math.isnan(unpack(pack(math.nan, "json", "x")))
    assert unpack(pack((1, (2,)), "json", "x")) == [1, [2]]
    assert unpack(pack((1, (2,)), "pickle", "x"), ["pickle"]) == (1, (2,))


@pytest.mark.parametrize("value", [{1: 2}, object(), {"a": {(1,): 2}}, b"x", {1, 2}])
def test_values_that_json_would_change_are_refused(value: object) -> None:
    with pytest.raises(
        Unpackable, match=r'Cannot serialize the result of rank 3 .*serialization="pickle"'
    ):
        pack(value, "json", "the result of rank 3")


def test_another_pythons_pickle_is_refused() -> None:
    packed = pack({1, 2}, "pickle", "x")
    with pytest.raises(OtherPython, match=r"pickled by Python 3\.2"):
        unpack(packed._replace(python="3.2"), ["pickle"])
    assert unpack(packed, ["json", "pickle"]) == {1, 2}


@pytest.mark.parametrize("formats", [(), ["json"]])
def test_only_requested_formats_are_read(formats: list[str]) -> None:
    with pytest.raises(UnwantedFormat, match="'pickle', which is not accepted"):
        unpack(pack({1}, "pickle", "x"), formats)
    with pytest.raises(UnwantedFormat):
        unpack(Packed("yaml", "3.11", "1"), ["yaml"])


@pytest.mark.parametrize(
    ("format", "data"), [("json", "{"), ("json", "[" * 100_000), ("pickle", "!")]
)
def test_unreadable_values_raise_one_error(format: str, data: str) -> None:
    with pytest.raises(Unpackable):
        unpack(pack(1, format, "x")._replace(data=data), [format])


@pytest.mark.parametrize("format", ["json", "pickle"])
def test_a_value_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    monkeypatch.setattr(serialization, "LARGEST", 100)
    assert pack("x" * 10, format, "x")
    with pytest.raises(Unpackable, match=r"an argument .* characters, and the limit is 100"):
        pack("x" * 100, format, "an argument")
