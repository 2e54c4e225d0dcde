"""The client's end in a pod: what the node's ranks leave goes to stdout, a line each.

The client answers each last word with the rank's number on stdin once it has it; only then does the
rank go on. A client whose call is not known here may bring it, as JSON objects:

    {"bring": MANIFEST, "call": CALL}             answered by Wants
    {"content": LINE, "data": BASE64, "more": B}  for each of these, in pieces
    {"whole": true}                               answered by Ready, or by Refused at any time
    {"go": NUMBER}                                the ranks begin
    {"end": true}                                 at any time: the ranks of the call are killed

A stdin that ends is a client that has gone. A dot alone says that the connection lives.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from torchrun_sdk.spec import (
    FREE,
    RESULTS,
    Call,
    Exited,
    FrameError,
    Here,
    Lines,
    Raised,
    Ready,
    Refused,
    Wants,
    Word,
    decode,
    encode,
    load_call,
    read_call,
)
from torchrun_sdk.worker.places import END, Place, Stay
from torchrun_sdk.worker.receive import Receiver

_POLL = 0.05
_BEAT = 5.0
_PIECE = 1 << 20  # bytes of output in a word; longer lines are not shown


def collect(folder: Path, call: str) -> int:
    """Serve one client of this call, "" for the newest, until it goes; the exit code."""
    return _Client(folder, call).serve()


class _Client:
    def __init__(self, folder: Path, call: str) -> None:
        self._folder = folder
        self._stay = Stay(folder)
        self._receiver = Receiver(folder.parent)
        self._brought: Call | None = None
        self._brings = bool(call)
        self._id = call or self._stay.newest[1] or read_call(folder).id
        self._results = folder / RESULTS / self._id
        self._sent: set[str] = set()
        self._logs: dict[Path, _Tail] = {}
        self._rest = b""

    def serve(self) -> int:
        beaten = time.monotonic()
        _say(self._here())
        while True:
            self._tell()
            ready, _, _ = select.select([sys.stdin.fileno()], [], [], _POLL)
            if ready and not self._hear():
                return 0
            if time.monotonic() - beaten > _BEAT:
                beaten = time.monotonic()
                print(".", flush=True)

    def _here(self) -> Here:
        first = not int(os.environ.get("TORCHRUN_ATTEMPT") or 0)
        known = any(self._results.glob("*")) or (first and read_call(self._folder).id == self._id)
        state = self._stay.take_state() if self._brings and not known else FREE
        return Here(known, state, self._stay.newest[0])

    def _tell(self) -> None:
        for path in sorted(self._results.glob("*.log")):
            tail = self._logs.setdefault(path, _Tail(path))
            while lines := tail.read():
                _say(lines)
        for path in sorted(self._results.glob("*.started")) + sorted(self._results.glob("*.left")):
            # A rank that begins again has left nothing, and says so by its time.
            mark = f"{path.name} {path.stat().st_mtime_ns}"
            if mark not in self._sent:
                self._sent.add(mark)
                print(_aged(path.read_text(encoding="utf-8")), flush=True)

    def _hear(self) -> bool:
        """Whether the client is still there."""
        told = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + told).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                self._do(json.loads(line))
            elif line.strip():
                Place(self._results, int(line)).take()
        return bool(told)

    def _do(self, asked: dict[str, Any]) -> None:
        try:
            if "bring" in asked:
                self._brought = load_call(json.dumps(asked["call"]))
                _say(Wants(self._receiver.wants(asked["bring"])))
            elif "content" in asked:
                more = bool(asked.get("more"))
                self._receiver.content(asked["content"], asked["data"], more=more)
            elif "whole" in asked:
                self._receiver.finish()
                _say(Ready())
            elif "go" in asked and self._brought is not None:
                self._stay.put(self._brought._replace(number=asked["go"]))
            elif "end" in asked:
                self._results.mkdir(parents=True, exist_ok=True)
                (self._results / END).touch()
        except (OSError, ValueError) as error:
            _say(Refused(str(error)))


def _aged(line: str) -> str:
    """What a rank has left, with the time since its end as this node counts it."""
    try:
        word = decode(line)
    except FrameError:  # for the client to tell
        return line
    if isinstance(word, (Raised, Exited)) and word.monotonic:
        return encode(word._replace(age=time.monotonic() - word.monotonic))
    return line


class _Tail:
    """The lines of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rank = int(path.stem)
        self._at = 0
        self._lines = 0

    def read(self) -> Lines | None:
        """Those that are new, a part of them where they are many."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read(_PIECE).rpartition(b"\n")
        if not newline:
            return None
        self._at += len(whole) + 1
        lines = whole.decode(errors="replace").split("\n")
        first, self._lines = self._lines, self._lines + len(lines)
        return Lines(self._rank, first, lines)


def _say(word: Word) -> None:
    print(encode(word), flush=True)
