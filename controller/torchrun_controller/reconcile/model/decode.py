"""Decodes JSON from termination messages and annotations, which may hold anything."""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

# The limits of the status.
ReasonString = Annotated[str, Meta(pattern="^([A-Za-z][A-Za-z0-9]{0,62})?$")]
Number = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


def read(text: str, shape: type[T]) -> T | None:
    """Return the decoded value; None if the text is not of this shape."""
    try:
        return msgspec.json.decode(text, type=shape)
    except (ValueError, RecursionError):  # deep nesting
        return None
