"""The source of a function: the project to upload, and its name in it. Never bytecode."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

from torchrun_sdk.errors import UsageError
from torchrun_sdk.source import notebooks
from torchrun_sdk.spec import CELL, SCRIPT_NAME, Reference

# Files that mark the top directory of a project; the nearest one counts.
MARKERS = ("torchrun.toml", "pyproject.toml", "setup.py", "setup.cfg", ".git")


class Project(NamedTuple):
    """A directory to upload, and a function in it."""

    root: Path
    function: Reference


def locate(
    function: Callable[..., Any], root: Path | None = None, values: object = None
) -> Project:
    """The source of the function. `root`: the directory to upload; default: its project.

    values: the arguments, if they are pickled.

    Raises UsageError for a function that cannot be imported by name: a lambda, a nested function, a
    method of an object, a function of a prompt that does not keep its source, one whose name leads
    to another function.
    """
    qualname = getattr(function, "__qualname__", "")
    if not qualname or "<" in qualname:
        what = "a lambda" if "<lambda>" in qualname else f"{qualname or function!r}"
        raise UsageError(
            f"{what} cannot be called remotely, because it cannot be imported by name. Define a"
            " function at the top level of a file."
        )
    if inspect.ismethod(function) and not isinstance(function.__self__, type):
        raise UsageError(
            f"{qualname} is a method of an object, which is not sent. Define a function that gets"
            " or creates the object."
        )
    name = function.__module__
    _check_name(function)
    if notebooks.is_interactive(function):
        top = (root or project(Path.cwd())).resolve()
        source = notebooks.module_source(function, values)
        return Project(top, Reference(qualname, script=CELL, path=_paths(top), cell=source))
    file = _file(function)
    top = (root or project(file.parent)).resolve()
    if not file.is_relative_to(top) if hasattr(file, "is_relative_to") else top not in file.parents:
        raise UsageError(f"{file} is outside the uploaded directory {top}. Pass directory= to fn.")
    if name in ("__main__", SCRIPT_NAME):
        script = file.relative_to(top).as_posix()
        module, package = _run_as_module(file)
        if not package:
            return Project(top, Reference(qualname, script=script))
        path = [*_import_path(module, file, top), *_paths(top)]
        return Project(top, Reference(qualname, script=script, path=path, package=package))
    path = [*_import_path(name, file, top), *_paths(top)]
    return Project(top, Reference(qualname, module=name, path=path))


def _check_name(function: Callable[..., Any]) -> None:
    """Raises UsageError if the pods, which import the function by its name, would call another.

    A wrapper has the name of the function that it wraps (functools.wraps), and an inherited class
    method that of the base class.
    """
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    found = getattr(found, "torchrun_function", found)
    if found == function or _is_same(found, function):
        return
    name = f"{function.__module__}.{function.__qualname__}"
    raise UsageError(
        f"The pods would call another function: {name} is not the function that you called. It has"
        " its name from functools.wraps or a base class, or the name was defined again later."
        " Define a function at the top level that calls it."
    )


def _is_same(found: Any, function: Callable[..., Any]) -> bool:
    """Whether it is the same function, from before its module was loaded again or its cell run."""
    if notebooks.is_interactive(function):
        return not hasattr(function, "__wrapped__")  # its own source is sent
    if not (inspect.isfunction(function) and inspect.isfunction(found)):
        return False
    has_state = function.__closure__ or hasattr(function, "__wrapped__")
    return not has_state and function.__code__ == found.__code__


def _run_as_module(file: Path) -> tuple[str, str]:
    """The names of module and package of a script that `python -m` runs; "" without them."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        return "", ""  # a script, or the __main__ of a debugger
    return spec.name, spec.parent or ""


def _import_path(name: str, file: Path, top: Path) -> list[str]:
    """The entry of sys.path for a module, besides the top directory."""
    start = file.parents[len(name.split(".")) - (1 if file.name != "__init__.py" else 0)]
    start = _import_root(name, file) or start
    return [] if start == top else [_below(start, top, name)]


def project(start: Path) -> Path:
    """The nearest directory at or above with one of MARKERS, below home; else this one."""
    try:
        home = Path.home().resolve()
    except RuntimeError:  # a container with a UID that has no name
        home = Path(start.anchor)
    for here in (start, *start.parents):
        if here in (home, Path(here.anchor)):
            break
        if any((here / marker).exists() for marker in MARKERS):
            return here
    return start


def _file(function: Callable[..., Any]) -> Path:
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise UsageError(
            f"{function.__qualname__} is not defined in a file. Save it as a module and import it."
        )
    return Path(file).resolve()


def _import_root(name: str, file: Path) -> Path | None:
    """The entry of sys.path from which the module is imported."""
    parts = name.split(".")
    for entry in sys.path:
        base = Path(entry or ".").resolve()
        place = base.joinpath(*parts)
        if file in (place.with_suffix(".py"), place / "__init__.py"):
            return base
    return None


def _below(start: Path, top: Path, name: str) -> str:
    try:
        return start.relative_to(top).as_posix()
    except ValueError:
        raise UsageError(
            f"{name} is imported from {start}, which is outside the uploaded directory {top}. Pass"
            " directory= to fn."
        ) from None


def _paths(top: Path) -> list[str]:
    """The entries of sys.path in the project, such as `src`."""
    entries = []
    for entry in sys.path:
        place = Path(entry or ".").resolve()
        if top in place.parents and "site-packages" not in place.parts:
            entries.append(place.relative_to(top).as_posix())
    return entries
