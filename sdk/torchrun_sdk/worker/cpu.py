"""Replaces nccl by gloo on machines without GPUs (TORCHRUN_SDK_CPU_ONLY=1)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Callable

_MODULE = "torch.distributed"


def without_gpus() -> None:
    """Replace nccl by gloo in torch.distributed when it is imported."""
    if _MODULE in sys.modules:
        _patch(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """An import hook that patches the module after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run: Callable[[ModuleType], None] = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _patch(module)

            loader.exec_module = exec_module
        return spec


def _patch(distributed: Any) -> None:
    begin: Callable[..., Any] | None = getattr(distributed, "init_process_group", None)
    if begin is None:  # a torch without distributed
        return

    @functools.wraps(begin)
    def init_process_group(backend: Any = None, *rest: Any, **named: Any) -> Any:
        return begin("gloo" if backend == "nccl" else backend, *rest, **named)

    distributed.init_process_group = init_process_group
