"""Test runs in forks of a process that has imported the code and collected the tests.

A fork takes milliseconds, a new process seconds. The bug is put into the code objects of loaded
functions, and into the file for separate processes.
"""

import gc
import os
import traceback
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from msgspec import Struct

from mutants import fork_server
from mutants.fork_server import KILLED_BY_COLLECTION, KILLED_BY_TIME

_Key = tuple[str, int]
"""Qualified name and first line."""


class Request(Struct, frozen=True):
    """Tests to run in order until one fails. `mutated`: the new text of `file`, if any."""

    tests: tuple[str, ...]
    seconds: float
    file: str = ""
    mutated: str = ""


class Collected:
    """A process that has collected `tests` for the code in `copy`."""

    def __init__(self, copy: Path, tests: Sequence[str]) -> None:
        self._ours, theirs = Pipe()
        (copy / "tests").write_text("".join(f"{test}\n" for test in tests))
        self._pid = os.fork()
        if not self._pid:
            self._ours.close()
            code = 70
            try:
                code = fork_server.run_pytest(copy, copy / "log", [_Loop(copy, theirs)], stop=False)
            except BaseException:  # a fork never returns into its parent's code
                (copy / "log").write_text(traceback.format_exc())
            os._exit(code)
        theirs.close()
        self._log = copy / "log"
        if self._receive(300) != "ready":
            raise RuntimeError(f"the tests were not collected:\n{self._log.read_text()[-3000:]}")

    def run(self, request: Request) -> "CollectedRun":
        """Start a run; only one at a time."""
        self._ours.send(request)
        return CollectedRun(self._ours)

    def end(self) -> None:
        """End the process. Later forks inherit its connection, so closing it has no effect."""
        self._ours.send(None)
        os.waitpid(self._pid, 0)

    def _receive(self, seconds: float) -> str:
        if not self._ours.poll(seconds):
            return ""
        try:
            message: str = self._ours.recv()
        except EOFError:
            return ""
        return message


class CollectedRun:
    """One run, with the interface of `fork_server.Run`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def poll(self) -> str | None:
        """The first failure: a test or "time"; "" for none. None while it runs."""
        if not self._connection.poll():
            return None
        message: str = self._connection.recv()
        return message


class _Loop:
    """A pytest plugin with a loop over requests instead of the loop over tests."""

    def __init__(self, copy: Path, connection: Connection) -> None:
        self._copy = copy
        self._connection = connection
        self._failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each phase of each test."""
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answer requests until the connection ends."""
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()
        self._connection.send("ready")
        while (request := self._connection.recv()) is not None:
            self._connection.send(self._answer(items, request))
        return True

    def _answer(self, items: dict[str, pytest.Item], request: Request) -> str:
        verdict = self._copy / "verdict"
        verdict.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            self._connection.close()
            os.setsid()
            try:
                verdict.write_text(self._run(items, request))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        if not fork_server.wait(pid, request.seconds):
            return KILLED_BY_TIME
        return verdict.read_text() if verdict.exists() else KILLED_BY_COLLECTION

    def _run(self, items: dict[str, pytest.Item], request: Request) -> str:
        if request.file:
            put_into_functions(self._copy / request.file, request.mutated)
        for test in request.tests:
            item = items.get(test)
            if item is None:
                continue
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self._failed:
                break
        return self._failed


def put_into_functions(path: Path, mutated: str) -> int:
    """Replace the code of functions in a loaded module. Returns the number of changes."""
    new = _codes(compile(mutated, str(path), "exec", dont_inherit=True))
    changed = 0
    gc.unfreeze()  # else the collector does not list them
    for function in gc.get_objects():
        if not isinstance(function, FunctionType):
            continue
        old = function.__code__
        if old.co_filename != str(path):
            continue
        code = new.get((old.co_qualname, old.co_firstlineno))
        if code is not None and code != old and code.co_freevars == old.co_freevars:
            function.__code__ = code
            changed += 1
    return changed


def _codes(code: CodeType) -> dict[_Key, CodeType]:
    """Code objects of functions, also of nested ones."""
    codes: dict[_Key, CodeType] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            codes[constant.co_qualname, constant.co_firstlineno] = constant
            codes |= _codes(constant)
    return codes
