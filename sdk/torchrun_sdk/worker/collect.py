"""The program that a client runs in a pod: it prints the frames of the node's ranks, one per line.

The client acknowledges the last frame of a rank by the rank's number on stdin; only then does the
rank continue. A client whose call is not known here may deliver it, as JSON objects:

    {"bring": MANIFEST, "call": CALL}             answered by Wants
    {"content": LINE, "data": BASE64, "more": B}  for each of these, in pieces
    {"whole": true}                               answered by Ready, or by Refused at any time
    {"go": NUMBER}                                the ranks start
    {"end": true}                                 at any time: the ranks of the call are killed

The end of stdin means that the client has disconnected. A line with a dot keeps the connection
alive.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, TextIO

from torchrun_sdk.spec import (
    FREE,
    RESULTS,
    Call,
    Exited,
    FrameError,
    Here,
    Lines,
    Message,
    Raised,
    Ready,
    Refused,
    Removed,
    Wants,
    decode,
    encode,
    load_call,
    read_call,
)
from torchrun_sdk.worker.call_files import END, RankFiles, WarmPod
from torchrun_sdk.worker.receive import Receiver

_POLL = 0.05
_BEAT = 5.0
_PIECE = 1 << 20  # bytes of output in a message


def collect(folder: Path, call: str) -> int:
    """Serve one client of this call, "" for the latest, until it disconnects; the exit code."""
    with closing(_Client(folder, call)) as client:
        return client.serve()


class _Client:
    def __init__(self, folder: Path, call: str) -> None:
        self._folder = folder
        self._pod = WarmPod(folder)
        self._receiver = Receiver(folder.parent)
        self._call: Call | None = None
        self._brings = bool(call)
        self._id = call or self._pod.newest[1] or read_call(folder).id
        self._results = folder / RESULTS / self._id
        self._sent_marks: set[str] = set()
        self._ended: set[int] = set()  # ranks of which it got the last frame, or never will
        self._logs: dict[Path, _Tail] = {}
        self._pieces: list[bytes] = []  # of a line whose end has not arrived

    def serve(self) -> int:
        last_beat = time.monotonic()
        _send(self._here())
        while True:
            self._send_new()
            ready, _, _ = select.select([sys.stdin.fileno()], [], [], _POLL)
            if ready and not self._receive():
                return 0
            if time.monotonic() - last_beat > _BEAT:
                last_beat = time.monotonic()
                print(".", flush=True)

    def close(self) -> None:
        """Close the logs."""
        for tail in self._logs.values():
            tail.close()

    def _here(self) -> Here:
        first = not int(os.environ.get("TORCHRUN_ATTEMPT") or 0)
        has_call = any(self._results.glob("*")) or (
            first and read_call(self._folder).id == self._id
        )
        state = self._pod.take_state() if self._brings and not has_call else FREE
        return Here(has_call, state, self._pod.newest[0], self._id)

    def _send_new(self) -> None:
        """Send what is new.

        All files are opened first: while the lines are sent, which may take long, another client
        may read the rest, and the next call removes the files of a call that was read.
        """
        for path in sorted(self._results.glob("*.log")):
            if path not in self._logs:
                with suppress(FileNotFoundError):
                    self._logs[path] = _Tail(path)
        with ExitStack() as files:
            frames = [files.enter_context(file) for file in self._new_frames()]
            for tail in self._logs.values():
                while lines := tail.read():
                    _send(lines)
            for file in frames:
                print(_aged(file.read()), flush=True)
        for rank in self._removed_ranks():
            _send(Removed(rank))

    def _new_frames(self) -> Iterator[TextIO]:
        for path in sorted(self._results.glob("*.started")) + sorted(self._results.glob("*.left")):
            with suppress(FileNotFoundError):
                # The new time of its start file shows that a rank has started again, which has no
                # outcome yet.
                mark = f"{path.name} {path.stat().st_mtime_ns}"
                if mark not in self._sent_marks:
                    file = path.open(encoding="utf-8")
                    self._sent_marks.add(mark)
                    if path.suffix == ".left":
                        self._ended.add(int(path.stem))
                    yield file

    def _removed_ranks(self) -> Iterator[int]:
        """The ranks whose last frame another client has read, and a later call has removed."""
        if self._pod.newest[1] in ("", self._id):
            return
        for path in sorted(self._results.glob("*.taken")):
            rank = int(path.stem)
            if rank not in self._ended and not path.with_suffix(".left").exists():
                self._ended.add(rank)
                yield rank

    def _receive(self) -> bool:
        """Whether the client is still connected."""
        received = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, rest = received.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._pieces, lines[0]])
            self._pieces = []
        self._pieces.append(rest)
        for line in lines:
            if line.startswith(b"{"):
                self._do(json.loads(line))
            elif line.strip():
                RankFiles(self._results, int(line)).mark_read()
        return bool(received)

    def _do(self, request: dict[str, Any]) -> None:
        try:
            if "bring" in request:
                self._call = load_call(json.dumps(request["call"]))
                _send(Wants(self._receiver.wants(request["bring"])))
            elif "content" in request:
                more = bool(request.get("more"))
                self._receiver.content(request["content"], request["data"], more=more)
            elif "whole" in request:
                self._receiver.finish()
                _send(Ready())
            elif "go" in request and self._call is not None:
                self._pod.put(self._call._replace(number=request["go"]))
            elif "end" in request:
                self._results.mkdir(parents=True, exist_ok=True)
                (self._results / END).touch()
        except (OSError, ValueError) as error:
            _send(Refused(str(error)))


def _aged(line: str) -> str:
    """A frame of a rank; that of a failure with the time since then, by the clock of this node."""
    try:
        message = decode(line)
    except FrameError:  # the client reports it
        return line
    if isinstance(message, (Raised, Exited)) and message.monotonic:
        return encode(message._replace(age=time.monotonic() - message.monotonic))
    return line


class _Tail:
    """The lines of a growing file, each once. The file may be removed meanwhile.

    A client that reconnects starts again, and gets the same lines with the same numbers.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._rank = int(path.stem)
        self._at = 0
        self._lines = 0
        self._is_skipping = False  # the rest of a line that is too long

    def read(self) -> Lines | None:
        """New lines, at most _PIECE bytes; None if there are none yet."""
        while True:
            self._file.seek(self._at)
            piece = self._file.read(_PIECE)
            if self._is_skipping:
                rest, newline, _ = piece.partition(b"\n")
                self._at += len(rest) + len(newline)
                self._is_skipping = not newline
                if not piece:
                    return None
                continue
            whole, newline, _ = piece.rpartition(b"\n")
            if newline:
                self._at += len(whole) + 1
                return self._numbered(whole.decode(errors="replace").split("\n"))
            if len(piece) < _PIECE:
                return None
            # Of a progress bar, a terminal shows only the last state.
            states, end_of_state, _ = piece[:-1].rpartition(b"\r")
            if end_of_state:
                self._at += len(states) + 1
                continue
            self._at += len(piece)
            self._is_skipping = True
            return self._numbered([f"[a line of more than {_PIECE} bytes is not shown]"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _numbered(self, lines: list[str]) -> Lines:
        first, self._lines = self._lines, self._lines + len(lines)
        return Lines(self._rank, first, lines)


def _send(message: Message) -> None:
    print(encode(message), flush=True)
