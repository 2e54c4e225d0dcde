"""Quantities are parsed exactly, and are rounded up when they are written."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_api.kinds.quantity import QuantityError, amount_of, format_bytes, format_cpu, parse

LARGEST = 2**63 - 1
SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        (0, Fraction(0)),
        (96, Fraction(96)),
        ("96", Fraction(96)),
        ("500m", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("+1", Fraction(1)),
        ("512Gi", Fraction(512 * 2**30)),
        ("1.5Gi", Fraction(3 * 2**29)),
        ("1e3", Fraction(1000)),
        ("1E3", Fraction(1000)),
        ("1E", Fraction(10**18)),
        ("25e-1", Fraction(5, 2)),
        (LARGEST, Fraction(LARGEST)),
    ],
)
def test_parse(value: int | str, amount: Fraction) -> None:
    assert parse(value) == amount


@pytest.mark.parametrize(
    "value",
    [
        *("", " 1", "1 Gi", "1gi", "Gi", "1e", "1e1.5", ".", "1_000", "0x10", "nan", "inf", "1/2"),
        *("-1", "-500m", "9Ei", "1e99", "1e999999999", "\u0663", "1\n", "1" * 65),
        *(-1, 2**63, True),
    ],
)
def test_invalid_quantities_are_refused(value: int | str) -> None:
    with pytest.raises(QuantityError) as refused:
        parse(value)
    assert repr(value)[:20] in str(refused.value)


@given(st.decimals(min_value=0, max_value=1, places=6), st.sampled_from(sorted(SUFFIXES)))
def test_every_suffix_scales_exactly(number: Decimal, suffix: str) -> None:
    assert parse(f"{number:f}{suffix}") == Fraction(number) * SUFFIXES[suffix]


@given(st.text(max_size=80) | st.integers())
def test_any_value_is_parsed_or_refused(value: int | str) -> None:
    try:
        amount = parse(value)
    except QuantityError:
        return
    assert 0 <= amount <= LARGEST


@given(st.fractions(min_value=0, max_value=10**9))
def test_cpu_rounds_up_to_a_millicore(cores: Fraction) -> None:
    written = parse(format_cpu(cores))
    assert cores <= written < cores + Fraction(1, 1000)
    assert parse(format_cpu(written)) == written


@given(st.fractions(min_value=0, max_value=LARGEST // 2))
def test_bytes_round_up_to_a_byte(amount: Fraction) -> None:
    written = parse(format_bytes(amount))
    assert amount <= written < amount + 1


@given(st.integers(1, 1023), st.integers(0, 5))
def test_bytes_take_the_largest_exact_suffix(number: int, power: int) -> None:
    suffix = ("", "Ki", "Mi", "Gi", "Ti", "Pi")[power]
    assert format_bytes(Fraction(number * 1024**power)) == f"{number}{suffix}"


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        (Fraction(0), "0"),
        (Fraction(2), "2"),
        (Fraction(3, 2), "1500m"),
        (Fraction(1, 3), "334m"),
        (Fraction(19999, 10000), "2"),
    ],
)
def test_format_cpu(cores: Fraction, text: str) -> None:
    assert format_cpu(cores) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (Fraction(0), "0"),
        (Fraction(1000), "1000"),
        (Fraction(3 * 2**29), "1536Mi"),
        (Fraction(2**60), "1Ei"),
        (Fraction(1025), "1025"),
        (Fraction(2047, 2), "1Ki"),
    ],
)
def test_format_bytes(amount: Fraction, text: str) -> None:
    assert format_bytes(amount) == text


@pytest.mark.parametrize(
    ("value", "amount"), [("2Gi", 2**31), ("9e99", LARGEST), (2**64, LARGEST), ("-1", 0), ("x", 0)]
)
def test_the_amount_of_an_accepted_quantity(value: int | str, amount: int) -> None:
    assert amount_of(value) == amount
