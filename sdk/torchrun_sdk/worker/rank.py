"""A rank: find the function, call it, write its result, wait until a client has read it."""

from __future__ import annotations

import importlib
import linecache
import os
import signal
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Callable

from torchrun_sdk import serialization
from torchrun_sdk.source.import_guard import CallInImport, importing
from torchrun_sdk.spec import (
    END_OF_CALL,
    HEAD,
    IN_CALL,
    RAISED,
    RESULTS,
    SCRIPT_NAME,
    Call,
    Raised,
    Reference,
    Result,
    Started,
    encode,
    load_call,
    read_call,
)
from torchrun_sdk.worker import ray
from torchrun_sdk.worker.call_files import RankFiles, node
from torchrun_sdk.worker.serve import serve


def run(folder: Path) -> int:
    """Run the call of the workspace, and later ones in warm pods; the exit code of the rank."""
    call = read_call(folder)
    os.environ[IN_CALL] = call.id
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if call.framework == "ray" and ray.index() > 0:
        return ray.work(call, os.environ["PET_MASTER_ADDR"])
    files, start = _rank_files(folder, call), time.monotonic()
    try:
        with _surroundings(call, folder):
            if call.idle > 0:
                return serve(folder, call, files.rank)
            code = _attempt(call, folder.parent, files)
            files.wait(call.linger, failed=code != 0)
            return code
    except Exception as error:  # of Ray's start or end: those of the function are already written
        files.write_outcome(encode(_raised(error, files.rank, start)))
        files.wait(call.linger, failed=True)
        return RAISED


def _surroundings(call: Call, folder: Path) -> AbstractContextManager[None]:
    if call.framework != "ray":
        return nullcontext()
    return ray.joined(call, folder) if call.cluster else ray.head(call)


def run_one(folder: Path, file: Path, root: Path | None = None) -> int:
    """Run the call of a file in a separate process, without waiting for clients.

    root: the project; default: the workspace.
    """
    call = load_call(file.read_text(encoding="utf-8"))
    os.environ[IN_CALL] = call.id
    return _attempt(call, root or folder.parent, _rank_files(folder, call))


def _rank_files(folder: Path, call: Call) -> RankFiles:
    return RankFiles(folder / RESULTS / call.id, int(os.environ.get("RANK", "0")))


def _attempt(call: Call, root: Path, files: RankFiles) -> int:
    start = time.monotonic()
    files.write_start(encode(_started(files.rank)))
    try:
        outcome: Result | Raised = _call(call, root, files.rank)
    except BaseException as error:
        with suppress(BaseException):  # prints the traceback, and reports it to the launcher
            sys.excepthook(type(error), error, error.__traceback__)
        outcome = _raised(error, files.rank, start)
    if call.idle:
        print(END_OF_CALL.format(call=call.id))
    _flush()
    files.write_outcome(encode(outcome))
    return RAISED if isinstance(outcome, Raised) else 0


def _started(rank: int) -> Started:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Started(rank, world, node(), local, time.time(), time.monotonic())


def _call(call: Call, root: Path, rank: int) -> Result:
    if call.cpu_only:
        from torchrun_sdk.worker.cpu import without_gpus

        without_gpus()
    function = find(call.function, root)
    if call.framework == "ray" and call.function.script:
        ray.send_by_value(sys.modules[SCRIPT_NAME])
    arguments, keywords = serialization.unpack(call.arguments, serialization.FORMATS)
    returned = function(*arguments, **keywords)
    head = call.returns == HEAD
    if head and rank:
        returned = None
    value = serialization.pack(returned, call.arguments.format, f"the result of rank {rank}")
    _leave_group()
    return Result(rank, node(), value, head)


def find(reference: Reference, root: Path) -> Callable[..., Any]:
    """Import the function. Raises ImportError, and exceptions of the import of its module."""
    for entry in reversed([".", *reference.path]):
        sys.path.insert(0, str(root / entry))
    with importing(reference.qualname, reference.module or SCRIPT_NAME):
        try:
            module = _module(reference, root)
        except CallInImport as reached:
            module = reached.module
    member: Any = module
    for name in reference.qualname.split("."):
        member = getattr(member, name, None)
    # A decorated function is a remote one. Its inner function is called here.
    member = getattr(member, "torchrun_function", member)
    if not callable(member):
        where = reference.module or reference.script
        raise ImportError(f"{where} has no function {reference.qualname}")
    function: Callable[..., Any] = member
    return function


def _module(reference: Reference, root: Path) -> ModuleType:
    if reference.module:
        return importlib.import_module(reference.module)
    script = root / reference.script
    if not reference.package:
        sys.path.insert(0, str(script.parent))
    source = reference.cell.encode() or script.read_bytes()
    if reference.cell:  # for tracebacks
        lines = reference.cell.splitlines(keepends=True)
        linecache.cache[str(script)] = (len(source), None, lines, str(script))
    module = ModuleType(SCRIPT_NAME)
    module.__file__ = str(script)
    module.__package__ = reference.package or None
    # Pickled values name their classes in __main__, the module of the script on the client.
    sys.modules["__main__"] = sys.modules[SCRIPT_NAME] = module
    exec(compile(source, str(script), "exec"), module.__dict__)  # noqa: S102
    return module


def _raised(error: BaseException, rank: int, start: float) -> Raised:
    """start: time when the rank started, by the monotonic clock."""
    kind, now = type(error), time.monotonic()
    module = "__main__" if kind.__module__ == SCRIPT_NAME else kind.__module__
    return Raised(
        rank,
        node(),
        time.time(),
        f"{module}.{kind.__qualname__}",
        _text(error),
        _traceback(error),
        isinstance(error, serialization.OtherPython),
        now - start,
        now,
        base=next(each.__name__ for each in kind.__mro__ if each.__module__ == "builtins"),
    )


def _text(error: BaseException) -> str:
    """The message of an exception of the user, whose class may do anything."""
    try:
        return str(error)
    except BaseException as other:
        return f"<__str__ failed: {type(other).__name__}>"


def _traceback(error: BaseException) -> str:
    frames = _users(error.__traceback__)
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except BaseException:  # its message or its causes cannot be read
        return "".join(traceback.format_tb(frames))


def _users(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this package above the function."""
    own = str(Path(__file__).parents[1])
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(own):
        frames = frames.tb_next
    return frames


def _leave_group() -> None:
    """Destroy the process group, to avoid a warning of torch at exit."""
    distributed = sys.modules.get("torch.distributed")
    with suppress(Exception):
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
