"""A debugger in this process, for `kubectl torchrun debug`: pdb in the main thread, or debugpy.

sitecustomize loads this module in the main thread, at the signal of the command's helper in the pod
(launch/debug.py). The helper listens on a Unix socket in the folder of reports, which only the user
of the process can enter. The connection to it is the life of the debugger: once it is closed, the
process goes on, and nothing traces it any more.
"""

from __future__ import annotations

import _thread
import io
import json
import os
import pdb
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

SOCKET = "debug."  # and the pid
_ANSWER_SECONDS = 5.0
_LOCALHOST = "127.0.0.1"
_NO_VALIDATION = "PYDEVD_DISABLE_FILE_VALIDATION"  # its warning about frozen modules
_current: _Pdb | _Debugpy | None = None


def answer(folder: str, number: int, frame: FrameType) -> None:
    """Start the debugger that the helper wants. Without a helper, leave none behind.

    number: of the signal. frame: that it has interrupted.
    """
    global _current
    if _current is not None:
        _current.settle()
        if not _current.is_over:
            return
        _current = None
    connection = _connect(folder)
    if connection is None:
        return
    if _read_request(connection) != "pdb":
        _current = _Debugpy(connection, number)
        return
    _current = debugger = _Pdb(connection)
    debugger.stop_at(frame)
    if not debugger.is_over:
        sys.settrace(debugger.trace_dispatch)  # at the very end: the rest is not to be traced


def _connect(folder: str) -> socket.socket | None:
    """The connection to the helper; None if there is none."""
    # By a descriptor: the path may be too long for a socket.
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"/proc/self/fd/{place}/{SOCKET}{os.getpid()}")
        return connection
    except OSError:
        connection.close()
        return None
    finally:
        os.close(place)


def _read_request(connection: socket.socket) -> str:
    connection.settimeout(_ANSWER_SECONDS)
    line = b""
    while not line.endswith(b"\n"):  # one by one: what follows is for the debugger
        byte = connection.recv(1)
        if not byte:
            raise EOFError("the helper has ended")
        line += byte
    connection.settimeout(None)
    return str(json.loads(line)["debugger"])


class _Console(io.TextIOBase):
    """The other end of the connection as a terminal. A write to a closed one sends no SIGPIPE."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r", encoding="utf-8", errors="replace")

    def write(self, text: str) -> int:
        self._connection.sendall(text.encode("utf-8", "replace"), socket.MSG_NOSIGNAL)
        return len(text)

    def readline(self, _: int | None = -1) -> str:  # type: ignore[override]
        return self._lines.readline()


class _Pdb(pdb.Pdb):
    """pdb at the other end of a connection. It never ends the program: to quit is to detach."""

    def __init__(self, connection: socket.socket) -> None:
        console = _Console(connection)
        super().__init__("tab", console, console, None, True, False)  # type: ignore[arg-type]
        self.use_rawinput = False
        self.is_over = False
        self._connection = connection
        self._before = sys.gettrace()
        self._prompts = 0
        self._runs = False  # to a breakpoint

    def stop_at(self, frame: FrameType) -> None:
        """Read commands at this frame now, though the line that it executes has not ended."""
        self.reset()
        self.enterframe = frame  # of Python 3.12 and later
        above: FrameType | None = frame
        while above is not None:
            above.f_trace = self.trace_dispatch
            self.botframe = above
            above = above.f_back
        try:
            self.interaction(frame, None)
        except Exception:
            self._detach(frame)
        except BaseException:
            self._detach(frame)
            raise
        if self.is_over:
            self._detach(frame)

    def settle(self) -> None:
        """Detach if nobody is at the other end. A prompt finds out itself."""
        if not self._prompts and self._is_closed():
            self._detach(sys._getframe())

    def interaction(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Read commands."""
        self._runs = False
        self._prompts += 1
        try:
            super().interaction(*arguments, **options)
        finally:
            self._prompts -= 1
        if self._runs and self._is_closed():  # settle has left this to the prompt
            self.is_over = True

    def trace_dispatch(self, frame: FrameType, event: str, arg: object) -> Any:  # noqa: ANN401
        """Trace the program, which must not see any failure of the debugger."""
        if self.is_over:
            return None
        try:
            return self._unless_over(super().trace_dispatch(frame, event, arg), frame)
        except Exception:
            self._detach(frame)
            return None
        except BaseException:
            self._detach(frame)
            raise

    def _unless_over(self, traced: Any, frame: FrameType) -> Any:  # noqa: ANN401
        if self.is_over:
            self._detach(frame)
            return None
        return traced

    def set_continue(self) -> None:
        """Go on: to the next breakpoint, or without the debugger if there is none."""
        if self.breaks:
            self._runs = True
            super().set_continue()
        else:
            self.is_over = True

    def do_quit(self, _: str) -> bool:
        """quit, or Ctrl-D: detach. The program goes on."""
        self.is_over = True
        return True

    do_q = do_exit = do_EOF = do_quit  # type: ignore[assignment]  # noqa: N815

    def do_clear(self, arg: str) -> None:
        """clear: without an argument all breakpoints. pdb would ask on the stdin of the program."""
        if arg:
            super().do_clear(arg)
        else:
            self.clear_all_breaks()
            self.message("Deleted all breakpoints")

    do_cl = do_clear

    def do_run(self, _: str) -> bool:
        """run: not possible in a job."""
        self.message("A rank cannot be started again from here.")
        return False

    do_restart = do_run  # type: ignore[assignment]

    def _is_closed(self) -> bool:
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _detach(self, frame: FrameType | None) -> None:
        """Remove breakpoints and traces, and close the connection."""
        self.is_over = True
        sys.settrace(self._before)
        with suppress(Exception):
            self.clear_all_breaks()
        while frame is not None:
            if frame.f_trace == self.trace_dispatch:
                frame.f_trace = None
            frame = frame.f_back
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Debugpy:
    """debugpy in sessions, one after the other. A thread follows the helper's requests.

    The helper listens on the loopback interface until the process has connected. An editor speaks
    with pydevd, the server of debugpy, directly: its adapter would listen as long as the session.
    """

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.is_over = False
        self._connection = connection
        self._number = number
        self._is_open = False
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            # Without threading: the signal may have interrupted it while it held its lock.
            _thread.start_new_thread(self._serve, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def settle(self) -> None:
        """Trace nothing if no session is open. In the main thread, whose trace it removes."""
        pydevd = sys.modules.get("pydevd")
        if not self._is_open and pydevd is not None:
            pydevd.stoptrace()

    def _serve(self) -> None:
        threading.current_thread().pydev_do_not_trace = True  # type: ignore[attr-defined]
        with suppress(OSError, ValueError):
            try:
                _import_debugpy()
            except Exception as error:
                self._send_message(missing=f"{type(error).__name__}: {error}")
                raise OSError from error
            self._send_message(ready=True)
            for line in self._connection.makefile("r"):
                port = json.loads(line).get("port")
                if port is None:
                    self._close_session()
                    continue
                self._is_open = True
                try:
                    _start_session(port)
                except Exception as error:
                    self._send_message(failed=f"{type(error).__name__}: {error}")
                    self._close_session()
        self.is_over = True
        self._connection.close()
        self._close_session()

    def _close_session(self) -> None:
        if self._is_open:
            self._is_open = False
            os.kill(os.getpid(), self._number)  # to settle in the main thread

    def _send_message(self, **message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        self._connection.sendall(line, socket.MSG_NOSIGNAL)


def _import_debugpy() -> None:
    """Import it without its warning on stderr. Raises what the import raises."""
    is_new = _NO_VALIDATION not in os.environ
    os.environ.setdefault(_NO_VALIDATION, "1")
    try:
        import debugpy.server.api  # noqa: F401
    finally:
        if is_new:
            os.environ.pop(_NO_VALIDATION, None)


def _start_session(port: int) -> None:
    """What debugpy.connect does, without its wait for the editor, which has no end."""
    import debugpy
    import pydevd  # type: ignore[import-not-found]

    pydevd.settrace(
        host=_LOCALHOST,
        port=port,
        suspend=False,
        wait_for_ready_to_run=False,
        patch_multiprocessing=False,
        notify_stdin=False,
        dont_trace_start_patterns=(os.path.dirname(os.path.abspath(debugpy.__file__)), __file__),
    )
