"""Stops a remote call that a module makes while a pod imports it.

A script may make its call at module level, without a guard. In the pod the import reaches the same
line, with the same names defined as on the client. The import ends there, and the pod calls the
function instead of creating a second job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torchrun_sdk.errors import UsageError
from torchrun_sdk.spec import IN_CALL

_importing: list[str] = []


class CallInImport(BaseException):
    """The import has reached the call. `module` has all names that the function may use."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__("the import reached the remote call")
        self.module = module


@contextmanager
def importing(qualname: str) -> Iterator[None]:
    """Active while the module of this function is imported; "" to see only what it defines."""
    _importing.append(qualname)
    try:
        yield
    finally:
        _importing.pop()


def in_call() -> bool:
    """Whether this process is a rank of a call."""
    return IN_CALL in os.environ


def check_remote_call(module: str, qualname: str) -> None:
    """Check a remote call of this function before it starts.

    Raises CallInImport during the import in a pod, UsageError anywhere else in a pod.
    """
    if not (in_call() or _importing):
        return
    imported = sys.modules.get(module)
    if _importing and imported is not None:
        name = _importing[-1].partition(".")[0]
        if not name or hasattr(imported, name):
            raise CallInImport(imported)
        raise UsageError(
            f"The import of {module} calls {qualname} remotely before {_importing[-1]} is defined."
            ' Move the call below if __name__ == "__main__".'
        )
    raise UsageError(
        f"{qualname} is called remotely inside a call, which would start another job. Use"
        f" {qualname}.local() there."
    )
