"""What programs and people leave as JSON in termination messages and annotations."""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

# As the status can hold them.
ReasonString = Annotated[str, Meta(pattern="^([A-Za-z][A-Za-z0-9]{0,62})?$")]
Number = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


def read(text: str, shape: type[T]) -> T | None:
    """The value that the text holds; None where it is anything else."""
    try:
        return msgspec.json.decode(text, type=shape)
    except (ValueError, RecursionError):  # deep nesting
        return None
