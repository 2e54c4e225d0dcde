"""Arguments and results as text: JSON, or pickle on request."""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

JSON = "json"
PICKLE = "pickle"
FORMATS = (JSON, PICKLE)
# The module name of a script in a pod: its block under `if __name__ == "__main__"` does not run.
SCRIPT_NAME = "__torchrun_script__"
LARGEST = 256 << 20  # characters of a value as text: the client keeps all of it in memory


class Packed(NamedTuple):
    """A value as text: `format` is json or pickle; `python` the version that packed it, "3.11"."""

    format: str
    python: str
    data: str


class Unpackable(ValueError):
    """A value that this format cannot represent."""


class UnwantedFormat(Unpackable):
    """A value in a format that is not accepted. It was not opened."""


class OtherPython(Unpackable):
    """A value that was pickled by another version of Python."""


def here() -> str:
    """The version of Python that determines the compatibility of pickles, such as "3.11"."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def pack(value: Any, format: str, what: str) -> Packed:
    """A value as text. Raises Unpackable. what: the name of the value in its message."""
    try:
        if format == PICKLE:
            # All Python versions of this package support protocol 4.
            data = base64.b64encode(pickle.dumps(value, protocol=4)).decode("ascii")
        else:
            data = json.dumps(value)
            if not _same(json.loads(data), value):
                raise TypeError("JSON would change it")
    except Exception as error:
        hint = (
            ' Pass serialization="pickle", or plain values (numbers, strings, lists, dicts with'
            " string keys)."
            if format == JSON
            else ""
        )
        raise Unpackable(f"Cannot serialize {what} as {format}: {error}.{hint}") from error
    if len(data) > LARGEST:
        raise Unpackable(
            f"Cannot serialize {what} as {format}: it has {len(data)} characters, and the limit is"
            f" {LARGEST}. Write it to a volume, and pass its path."
        )
    return Packed(format, here(), data)


def unpack(packed: Packed, formats: Sequence[str] = (JSON,)) -> Any:
    """The value. formats: the accepted ones; a pickle can run any code.

    Raises UnwantedFormat, OtherPython, or Unpackable if its class cannot be imported.
    """
    if packed.format not in formats or packed.format not in FORMATS:
        raise UnwantedFormat(f"its format is {packed.format!r}, which is not accepted")
    if packed.format == JSON:
        try:
            return json.loads(packed.data)
        except (ValueError, RecursionError) as error:
            raise Unpackable(f"it is not JSON: {error}") from error
    if packed.python != here():
        raise OtherPython(
            f"pickled by Python {packed.python}, but this is Python {here()}. Use an image with the"
            ' same version, or serialization="json".'
        )
    try:
        return _Unpickler(io.BytesIO(base64.b64decode(packed.data))).load()
    except Unpackable:
        raise
    except Exception as error:
        raise Unpackable(f"cannot unpickle it: {error!r}") from error


class _Unpickler(pickle.Unpickler):
    """Finds the classes of a script in its module on the client, `__main__`."""

    def find_class(self, module: str, name: str) -> Any:
        if module != SCRIPT_NAME:
            return super().find_class(module, name)
        try:
            return super().find_class("__main__", name)
        except AttributeError as error:
            raise Unpackable(
                f"{name} is defined in the script or notebook of the call, and this program does"
                f" not have it. Define {name} in a module that both import."
            ) from error


def _same(after: Any, before: Any) -> bool:
    """Whether JSON preserved the value; tuples may become lists."""
    if isinstance(before, dict):
        return (
            isinstance(after, dict)
            and all(isinstance(key, str) for key in before)
            and after.keys() == before.keys()
            and all(_same(after[key], value) for key, value in before.items())
        )
    if isinstance(before, (list, tuple)):
        return (
            isinstance(after, list)
            and len(after) == len(before)
            and all(_same(one, other) for one, other in zip(after, before))
        )
    # NaN differs from itself, and a bool is not the number that it equals.
    return type(after) is type(before) or after == before
