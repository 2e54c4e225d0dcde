"""What ranks returned, as values of this program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrun_sdk.errors import IncompatiblePython, ProtocolError, UntrustedPickle
from torchrun_sdk.serialization import OtherPython, Unpackable, UnwantedFormat, unpack
from torchrun_sdk.spec import Result


def open_results(results: Sequence[Result], formats: Sequence[str], job: str) -> list[Any]:
    """Their values, in the order of the ranks. formats: those that are accepted.

    Raises UntrustedPickle, IncompatiblePython, ProtocolError.
    """
    return [_open(result, formats, job) for result in results]


def _open(result: Result, formats: Sequence[str], job: str) -> Any:
    who = f"rank {result.rank} of {job}"
    try:
        return unpack(result.value, formats)
    except UnwantedFormat as error:
        raise UntrustedPickle(
            f"{who} answers in the format {result.value.format!r}, and this call accepts"
            f" {' and '.join(formats)}: it was not opened, as a pickle runs code of its"
            " author.",
            job=job,
        ) from error
    except OtherPython as error:
        text = f"the result of {who} was {error}"
        raise IncompatiblePython(text, job=job, rank=result.rank, node=result.node) from error
    except Unpackable as error:
        text = f"the result of {who} cannot be read: {error}"
        raise ProtocolError(text, job=job, rank=result.rank, node=result.node) from error
