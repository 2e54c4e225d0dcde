"""Results of ranks as Python values."""

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
            f"The result of {who} has format {result.value.format!r}, but this call accepts only"
            f" {' and '.join(formats)}. It was not opened, because a pickle can run any code.",
            job=job,
        ) from error
    except OtherPython as error:
        text = f"The result of {who} was {error}"
        raise IncompatiblePython(text, job=job, rank=result.rank, node=result.node) from error
    except Unpackable as error:
        text = f"Cannot decode the result of {who}: {error}"
        raise ProtocolError(text, job=job, rank=result.rank, node=result.node) from error
