"""Remote calls that are met inside a pod, where the module that makes them is imported.

A script may make its call at module level, unguarded. In the pod its import comes to the same
line, with the same names defined as the client had: there the import ends, and the function is
called instead of a second job being made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torchrun_sdk.errors import UsageError
from torchrun_sdk.spec import IN_CALL

_wanted: list[str] = []


class CallInImport(BaseException):
    """The import has come to the call; `module` has all that the function may use."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__("the import has come to the remote call")
        self.module = module


@contextmanager
def importing(qualname: str) -> Iterator[None]:
    """While the module of this function is imported; "" for none, only to see what it defines."""
    _wanted.append(qualname)
    try:
        yield
    finally:
        _wanted.pop()


def is_inside() -> bool:
    """Whether this process is a rank of a call."""
    return IN_CALL in os.environ


def met(module: str, qualname: str) -> None:
    """A remote call of this function is about to be made.

    Raises CallInImport in an import that it ends, UsageError in any other place of a pod.
    """
    if not (is_inside() or _wanted):
        return
    found = sys.modules.get(module)
    if _wanted and found is not None:
        name = _wanted[-1].partition(".")[0]
        if not name or hasattr(found, name):
            raise CallInImport(found)
        raise UsageError(
            f"{module} calls {qualname} remotely when it is imported, before {_wanted[-1]} is"
            ' defined: put the calls under if __name__ == "__main__".'
        )
    raise UsageError(
        f"{qualname} is called remotely from inside a call, which would start another job: call"
        f" {qualname}.local() there, or make the call from outside."
    )
