"""Stops what a module starts in the cluster while a pod imports it.

A script may make its call at module level, without a guard. In the pod the import reaches the same
line, with the same names defined as on the client. The import ends there, and the pod calls the
function instead of creating a second job. The same holds for `deploy` and `attach`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torchrun_sdk.errors import UsageError
from torchrun_sdk.spec import IN_CALL, SCRIPT_NAME

# Modules that are imported, and the function that is wanted of each.
_importing: list[tuple[str, str]] = []


class CallInImport(BaseException):
    """The import has reached the call. `module` has all names that the function may use."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__("the import reached the remote call")
        self.module = module


@contextmanager
def importing(qualname: str, module: str = SCRIPT_NAME) -> Iterator[None]:
    """Active while the module of this function is imported; "" to see only what it defines."""
    _importing.append((module, qualname))
    try:
        yield
    finally:
        _importing.pop()


def in_call() -> bool:
    """Whether this process is a rank of a call."""
    return IN_CALL in os.environ


def check_remote_call(action: str, instead: str = "") -> None:
    """Check that this process may call, deploy or attach. action: a verb and its object.

    instead: what to do inside a call. Raises CallInImport during the import in a pod, UsageError
    anywhere else in a pod.
    """
    if not (in_call() or _importing):
        return
    module, qualname = _importing[-1] if _importing else ("", "")
    imported = sys.modules.get(module)
    if imported is not None:
        name = qualname.partition(".")[0]
        if not name or hasattr(imported, name):
            raise CallInImport(imported)
        raise UsageError(
            f"The import of {module} wants to {action} before {name} is defined."
            ' Move this below if __name__ == "__main__".'
        )
    raise UsageError(f"A rank of a call cannot {action}. {instead or 'Do it after the call.'}")
