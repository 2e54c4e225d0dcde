"""The source of a module for a function of a notebook or a prompt.

Such a function is in no file, but the prompt has its source (IPython, Jupyter, Python from 3.13).
The module has the function and, transitively, the functions, classes, imports and plain values of
the session that it uses.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import pickle
import symtable
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Callable

from torchrun_sdk.errors import UsageError


def is_interactive(function: Callable[..., Any]) -> bool:
    """Whether it was defined at a prompt or in a cell, whose file does not exist."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    in_main = getattr(function, "__module__", "") == "__main__"
    return in_main and code is not None and not Path(code.co_filename).is_file()


def module_source(function: Callable[..., Any], values: object = None) -> str:
    """The source of a module with the function. Raises UsageError with the unsupported name.

    values: arguments that are pickled; the module also has the classes and functions in them.
    """
    session = vars(sys.modules["__main__"])
    writer = _Writer(session)
    writer.define(function.__name__, function, "")
    for name in sorted(_pickled_names(values)):
        if name in session:
            writer.define(name, session[name], "an argument")
    return "\n\n".join(["from __future__ import annotations", *writer.imports, *writer.parts, ""])


class _Writer:
    def __init__(self, session: dict[str, Any]) -> None:
        self._session = session
        self._names: set[str] = set()
        self.imports: list[str] = []
        self.parts: list[str] = []

    def define(self, name: str, value: Any, user: str) -> None:
        """Add the definition of a name of the session that `user` uses."""
        if name in self._names:
            return
        self._names.add(name)
        # A decorated function; the source includes its decorators.
        called = getattr(value, "torchrun_function", value)
        plain = inspect.unwrap(called)
        module = getattr(plain, "__module__", None)
        if isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif isinstance(plain, (FunctionType, type)) and module == "__main__":
            own = plain.__name__
            if own == name or not own.isidentifier():  # the source of a lambda has its name
                self._source(name, plain, is_decorated=plain is not called)
            elif self._session.get(own) is value or hasattr(value, "torchrun_function"):
                self.define(own, called, user)
                self.parts.append(f"{name} = {own}")
            else:  # a former definition, or a wrapper that no source has
                self.parts.append(f"{name} = {_literal(name, value, user)}")
        elif module and module != "__main__" and (own := _name_in(module, called)):
            self.imports.append(f"from {module} import {own} as {name}")
        else:
            self.parts.append(f"{name} = {_literal(name, value, user)}")

    def _source(self, name: str, value: Any, *, is_decorated: bool) -> None:
        try:
            typed = _class_source(value) if isinstance(value, type) else inspect.getsource(value)
            source = textwrap.dedent(typed)
        except (OSError, TypeError) as error:
            raise UsageError(
                f"The source of {name} is not available at this prompt. Save it as a module and"
                " import it, or use IPython, a notebook, or Python 3.13."
            ) from error
        if is_decorated and not source.lstrip().startswith("@"):
            raise UsageError(
                f"{name} is wrapped outside of its definition. Write the decorator above its def."
            )
        for used in sorted(_globals(source)):
            if used in self._session:
                self.define(used, self._session[used], name)
        self.parts.append(source.rstrip())


class _Names(pickle.Pickler):
    """Collects the names of the session that a pickle refers to, and keeps nothing of it."""

    def __init__(self) -> None:
        super().__init__(self, protocol=4)
        self.names: set[str] = set()

    def write(self, data: bytes) -> int:
        """Take a part of the pickle."""
        return len(data)

    def reducer_override(self, value: Any) -> Any:
        """Called with each class and function."""
        if isinstance(value, (FunctionType, type)) and value.__module__ == "__main__":
            self.names.add(value.__qualname__.partition(".")[0])
        return NotImplemented


def _pickled_names(values: object) -> set[str]:
    names = _Names()
    with suppress(Exception):  # that the values cannot be pickled is reported later
        names.dump(values)
    return names.names


def _class_source(value: type) -> str:
    """The source of a class; inspect only searches the file of __main__. Raises OSError."""
    for name in reversed(list(linecache.cache)):
        text = "" if Path(name).is_file() else "".join(linecache.getlines(name))
        with suppress(SyntaxError):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    return "\n".join(text.split("\n")[first - 1 : node.end_lineno])
    raise OSError("source code not available")


def _name_in(module: str, value: Any) -> str:
    """The name by which a module has exactly this function or class; "" if it has none.

    Its own name may be that of the function that it wraps.
    """
    members = vars(sys.modules[module]) if module in sys.modules else {}
    qualname = getattr(value, "__qualname__", "")
    names = [qualname, *members] if qualname in members else members
    for name in names:
        if value is getattr(members[name], "torchrun_function", members[name]):
            return str(name)
    return ""


def _literal(name: str, value: Any, user: str) -> str:
    text = repr(value)
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        same = False
    if not same:
        raise UsageError(
            f"{user} uses {name} of this session, a {type(value).__name__} that cannot be written"
            " to a module. Create it in the function, or pass it as an argument."
        )
    return text


def _globals(source: str) -> set[str]:
    """The global names that this source uses."""
    names: set[str] = set()
    tables = [symtable.symtable(source, "<cell>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        names |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (top or symbol.is_global())
        }
    return names
