"""Kubernetes quantities as exact numbers: `"512Gi"`, `"500m"`, `96`, `"1e3"`.

Arithmetic with `fractions.Fraction` is exact. Only formatting rounds, and it rounds up, so that no
pod gets less than it requests.

Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

import re
from fractions import Fraction
from functools import lru_cache
from math import ceil

_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SCALES: dict[str, Fraction] = {
    **{suffix: Fraction(10) ** power for suffix, power in _DECIMAL.items()},
    **{suffix: Fraction(1024**power) for power, suffix in enumerate(_BINARY)},
}
# Also the pattern of the CRDs, so in the syntax that Go and Python share. The only sign is "+".
PATTERN = r"^\+?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE]))?$"
MAX_LENGTH = 64
_LARGEST = 2**63 - 1  # the API server silently caps what is larger


class QuantityError(ValueError):
    """The value is not a quantity. The message names it and the accepted forms."""

    def __init__(self, value: object, problem: str, *, is_too_large: bool = False) -> None:
        super().__init__(f"{value!r} is not a quantity: {problem}")
        self.is_too_large = is_too_large


def parse(value: int | str) -> Fraction:
    """The exact amount, in cores, bytes or pieces.

    Raises QuantityError for anything but an integer or a string such as `"1.5"`, `"500m"`, `"2Gi"`
    or `"1e3"`, for negative amounts, and for amounts beyond 2^63-1.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise QuantityError(value, "it must be an integer or a string")
    return _parse(value)


def amount_of(value: int | str) -> Fraction:
    """The amount of a quantity that the API server has accepted. Does not raise.

    It caps what is larger than 2^63-1, as the API server does. What its schemas refuse counts as 0.
    """
    try:
        return parse(value)
    except QuantityError as error:
        return Fraction(_LARGEST if error.is_too_large else 0)


@lru_cache(maxsize=4096)  # a cluster has few different quantities
def _parse(value: int | str) -> Fraction:
    amount = Fraction(value) if isinstance(value, int) else _parse_text(value)
    if amount < 0:
        raise QuantityError(value, "it must not be negative")
    if amount > _LARGEST:
        raise QuantityError(value, "it is larger than 2^63-1", is_too_large=True)
    return amount


def _parse_text(text: str) -> Fraction:
    match = re.fullmatch(PATTERN, text) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise QuantityError(
            text[:MAX_LENGTH],
            'write a number with an optional suffix, as "1.5", "500m", "2Gi" or "1e3"',
        )
    number, exponent, suffix = match.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SCALES[suffix or ""]
    return Fraction(number) * scale


def format_cpu(cores: Fraction) -> str:
    """Cores as `"2"` or `"1500m"`, rounded up to a whole millicore."""
    millicores = ceil(cores * 1000)
    return f"{millicores}m" if millicores % 1000 else str(millicores // 1000)


def format_bytes(amount: Fraction) -> str:
    """Bytes as `"1536Mi"`: rounded up to a byte, with the largest exact binary suffix."""
    whole = ceil(amount)
    power = 0
    while whole and whole % 1024 == 0 and power < len(_BINARY) - 1:
        whole //= 1024
        power += 1
    return f"{whole}{_BINARY[power]}"
