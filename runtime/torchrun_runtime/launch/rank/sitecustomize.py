"""Every Python of the command loads it from PYTHONPATH. It writes a report if the process fails.

torchrun exits with 1 for any failing rank, and a rank without @record writes no error file. So two
kinds of processes write a report when an exception ends them: a rank (which exception, and when),
and torchrun itself, whose ChildFailedError has every rank's exit code. A program may replace
sys.excepthook, so the exception is looked for once more at exit. One that a program handles with
sys.exit(1), as click and Hydra do, counts as well.
It also leaves marks of what runs: the last Python that was started outside of another one and the
last one that ended, the import of torch, and processes that belong to a group. A process that forms
a group of torch asks NCCL for its log, which the launcher reads (network.py).
Each Python also registers faulthandler on a real-time signal
(TORCHRUN_STACK_SIGNAL), to write the stacks of all its threads to a separate file. On another one
(TORCHRUN_DEBUG_SIGNAL) it starts a debugger.
This module must not disturb the program: all errors are suppressed.
"""

from __future__ import annotations

import atexit
import os
import stat
import sys
import time
from contextlib import suppress
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

_FOLDER = os.environ.get("TORCHRUN_LAUNCH_REPORTS", "")
_OUTER_PYTHON = "TORCHRUN_OUTER_PYTHON"  # pid and RANK
_AGENT_ERROR = "ChildFailedError"  # of torch.distributed.elastic.multiprocessing.errors
_C10D = "torch.distributed.distributed_c10d"
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE")
# Packages that form groups without those of torch.
_OTHER_GROUPS = ("ray", "mpi4py", "horovod", "jax", "distributed", "pyspark")
# Earlier versions also print a line to stdout then.
_FIRST_SILENT_NCCL = (2, 22)
_nested = False
_marks: set[str] = set()
_reported: list[BaseException] = []
_LONGEST = 2000  # characters of a message


def _report(kind: type[BaseException], value: BaseException) -> None:
    import json

    if any(value is reported for reported in _reported):
        return
    _reported.append(value)
    failures = getattr(value, "failures", None) if _is_of_torchrun(kind) else None
    body = {
        "pid": os.getpid(),
        "time": time.time(),
        "rank": os.environ.get("RANK"),
        "nested": _nested,
        "type": kind.__name__,
        "message": _describe(kind, value),
        "failures": [
            {
                "rank": rank,
                "pid": failure.pid,
                "exitcode": failure.exitcode,
                "time": failure.timestamp,
                "message": _text(failure.message),
            }
            for rank, failure in (failures.items() if isinstance(failures, dict) else ())
        ],
    }
    path = os.path.join(_FOLDER, f"{os.getpid()}.{time.time_ns()}.json")
    with open(path + ".tmp", "w") as file:
        json.dump(body, file)
    os.replace(path + ".tmp", path)


def _describe(kind: type[BaseException], value: BaseException) -> str:
    """The last line of a traceback, without the notes below it (PEP 678)."""
    from traceback import TracebackException

    described = TracebackException(kind, value, None)
    described.__notes__ = None
    return list(described.format_exception_only())[-1].strip()[:_LONGEST]


def _is_of_torchrun(kind: type[BaseException]) -> bool:
    """Whether it is torchrun's exception. Others have failures as well: CheckpointException."""
    return kind.__name__ == _AGENT_ERROR


def _text(message: object) -> str:
    """The message in an error file of torch: a string, or an object that contains it."""
    return str(message.get("message", "") if isinstance(message, dict) else message)[:_LONGEST]


def _watch_exceptions() -> None:
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        with suppress(BaseException):
            _report(kind, value)
        before(kind, value, traceback)
        if _is_of_torchrun(kind):
            _leave_torchrun()

    sys.excepthook = excepthook


def _watch_exits() -> None:
    """Report what a replaced sys.excepthook has got, and what ends in sys.exit with a failure."""

    def at_exit() -> None:
        # Python sets it before it calls sys.excepthook (PyErr_PrintEx).
        value = getattr(sys, "last_value", None)
        if isinstance(value, BaseException) and sys.excepthook is not hook:
            with suppress(BaseException):
                _report(type(value), value)

    def leave(status: str | int | None = None, /) -> NoReturn:
        handled = sys.exc_info()[1]
        if handled is not None and status not in (None, 0, False):
            with suppress(BaseException):
                _report(type(handled), handled)
        original(status)

    hook, original = sys.excepthook, sys.exit
    atexit.register(at_exit)
    sys.exit = leave


def _mark(name: str) -> None:
    """Leave a mark for the launcher, once in each process."""
    if name not in _marks:
        _marks.add(name)
        with suppress(OSError):
            os.close(os.open(os.path.join(_FOLDER, name), os.O_WRONLY | os.O_CREAT, 0o600))


def _mark_last(name: str) -> None:
    with suppress(OSError), open(os.path.join(_FOLDER, name), "w") as file:
        file.write(f"{os.getpid()} {time.time()}")


def _mark_world() -> None:
    sizes = (os.environ.get(name, "") for name in _WORLD_SIZES)
    if any(size.isdecimal() and int(size) > 1 for size in sizes):
        _mark("saw.world")


class _ImportWatch:
    """The first finder of sys.meta_path. It finds nothing, but sees what is imported.

    A program may look for torch without importing it. Only the import of torch imports modules in
    it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        if package == "torch" and inner:
            _mark("saw.torch")
        elif package in _OTHER_GROUPS and inner:
            _mark("saw.world")
        if name == _C10D:
            with suppress(BaseException):
                return _with_marked_groups(name, path)
        return None


def _with_marked_groups(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The module of torch, whose init_process_group leaves a mark."""
    from functools import wraps
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return None
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        with suppress(BaseException):
            original = module.init_process_group

            @wraps(original)
            def init_process_group(*arguments: object, **options: object) -> object:
                _mark("saw.world")
                with suppress(BaseException):
                    _ask_for_network_log()
                return original(*arguments, **options)

            module.__dict__["init_process_group"] = init_process_group

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _ask_for_network_log() -> None:
    """Let NCCL log to the launcher, unless the user has set how it logs.

    A program may set the variables itself, so this is done as late as possible: NCCL reads them
    with its first communicator. A torch without NCCL raises AttributeError.
    """
    from importlib import import_module

    version = import_module("torch.cuda.nccl").version
    pipe = os.path.join(_FOLDER, "nccl.log")
    # Without the launcher that reads it, NCCL would write to stdout, or wait.
    if not stat.S_ISFIFO(os.stat(pipe).st_mode) or version() < _FIRST_SILENT_NCCL:
        return
    if not any(name.startswith("NCCL_DEBUG") for name in os.environ) and not _is_in_nccl_conf():
        os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET,ENV"
        os.environ["NCCL_DEBUG_FILE"] = pipe
        os.environ["NCCL_DEBUG"] = "INFO"


def _is_in_nccl_conf() -> bool:
    """Whether a file sets how NCCL logs. The environment would override it (initEnv in NCCL)."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for path in (own, "/etc/nccl.conf"):
        with suppress(OSError), open(path, "rb") as file:
            if b"NCCL_DEBUG" in file.read(1 << 20):
                return True
    return False


def _watch_processes() -> None:
    if not _nested:
        _mark_last("python.started")
        atexit.register(_mark_last, "python.ended")
    _mark_world()
    atexit.register(_mark_world)  # a program may set the variables itself
    sys.meta_path.insert(0, _ImportWatch())


def _leave_torchrun() -> None:
    """Exit at once: torchrun has ended its ranks, and to unload torch takes another 0.3 s."""
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _offer_stacks(number: int) -> None:
    """Register faulthandler, also in each forked child, with a file for each process."""
    import faulthandler
    import fcntl

    def register() -> None:
        path = os.path.join(_FOLDER, f"stack.{os.getpid()}")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # A high number, which programs that close and reuse descriptors do not use.
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 200)
        os.close(descriptor)
        faulthandler.register(number, file=high, all_threads=True)
        descriptors.append(high)

    def after_fork() -> None:
        with suppress(BaseException):
            os.close(descriptors.pop())
            register()

    descriptors: list[int] = []
    register()
    os.register_at_fork(after_in_child=after_fork)


def _offer_debugger(number: int) -> None:
    """Handle the signal of `kubectl torchrun debug`, unless the program has a handler for it."""
    # Not `signal`: it imports enum, which takes milliseconds.
    from _signal import SIG_DFL, getsignal, signal  # type: ignore[import-not-found]

    def answer(number: int, frame: FrameType | None) -> None:
        try:  # noqa: SIM105  # after the debugger nothing is called: it would be traced
            (loaded or load())[0].answer(_FOLDER, number, frame)
        except Exception:  # noqa: S110
            pass

    def load() -> list[ModuleType]:
        from importlib.util import module_from_spec, spec_from_file_location

        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torchrun_debugger.py")
        spec = spec_from_file_location("torchrun_debugger", path)
        if spec and spec.loader:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            loaded.append(module)
        return loaded

    loaded: list[ModuleType] = []
    if getsignal(number) == SIG_DFL:
        signal(number, answer)


def _is_nested() -> bool:
    """Whether a Python of the same rank is above this process; the first one tells the others."""
    rank = os.environ.get("RANK", "")
    outer, _, outer_rank = os.environ.get(_OUTER_PYTHON, "").partition(" ")
    if outer and outer_rank == rank:
        return outer != str(os.getpid())  # the same if it executes another program
    os.environ[_OUTER_PYTHON] = f"{os.getpid()} {rank}"
    return False


def _load_shadowed() -> None:
    """Run the sitecustomize of the image, which this module hides. It may change sys.path."""
    here = os.path.dirname(os.path.abspath(__file__))
    own_entries = [pair for pair in enumerate(sys.path) if os.path.abspath(pair[1]) == here]
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError:
        if own is not None:
            sys.modules["sitecustomize"] = own
    finally:
        for index, entry in own_entries:
            if entry not in sys.path:
                sys.path.insert(index, entry)


if _FOLDER and os.path.isdir(_FOLDER):
    _watch_exceptions()
    _watch_exits()
    with suppress(BaseException):
        _nested = _is_nested()
        _watch_processes()
    with suppress(BaseException):
        _offer_stacks(int(os.environ["TORCHRUN_STACK_SIGNAL"]))
    with suppress(BaseException):
        _offer_debugger(int(os.environ["TORCHRUN_DEBUG_SIGNAL"]))
if __name__ == "sitecustomize":  # a torchrun that waits for a round has it already
    _load_shadowed()
