"""The file: JSON lines, the first of which says what the rest is."""

import io
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode

import anyio
import msgspec
from msgspec import Raw, Struct

from torchrun_controller.client.session import resource_of
from torchrun_controller.replay.redact import redacted

VERSION = 1
_SELECTORS = ("labelSelector", "fieldSelector")
_NOTHING = Raw(b"")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class TapeError(Exception):
    """A file is no recording, or none of this version; the message says which line is wrong."""


class Head(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The first line. `namespaces` are those that were watched, () for all."""

    recording: int = VERSION
    controller: str = ""
    time: datetime
    namespaces: tuple[str, ...] = ()
    redacted: bool = False


class Line(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One thing that the API server has sent, and when.

    `source` is path and selectors of the request. Then comes one of: `opens` where the server
    begins to stream a list, `frame` for one event of a watch, `text` for one that is not JSON,
    `page` for one answer to a LIST or any other GET (`first` unless it goes on with a list).
    """

    time: datetime
    resource: str
    source: str
    opens: bool = False
    first: bool = False
    frame: Raw = _NOTHING
    text: str = ""
    page: Raw = _NOTHING


_encode = msgspec.json.Encoder().encode
_head = msgspec.json.Decoder(Head).decode
_line = msgspec.json.Decoder(Line).decode
_json = msgspec.json.Decoder(Raw).decode


def source_of(path: str, query: Mapping[str, str]) -> str:
    """What tells one watch from the others: the path, and what narrows it."""
    selectors = {name: query[name] for name in _SELECTORS if query.get(name)}
    return f"{path}?{urlencode(selectors)}" if selectors else path


class Tape:
    """Writes a recording of at most `limit` bytes; `full` is set where the next line has no room.

    Raises FileExistsError rather than write over a recording.
    """

    def __init__(self, path: Path, head: Head, limit: int) -> None:
        self.full = anyio.Event()
        self.lines = 0
        self._left = limit
        self._redacts = head.redacted
        # What runs in a namespace is for those who may read there.
        self._file: BinaryIO = os.fdopen(os.open(path, _NEW, 0o600), "wb")
        self._put(_encode(head))

    def opens(self, source: str) -> None:
        """The server begins to stream a list."""
        self._write(source, opens=True)

    def frame(self, source: str, line: bytes) -> None:
        """One event of a watch."""
        body = self._body(line)
        if body is None:
            self._write(source, text="" if self._redacts else line.decode(errors="replace"))
        else:
            self._write(source, frame=body)

    def page(self, source: str, body: bytes, *, first: bool) -> None:
        """One whole answer; one that is not JSON is left out."""
        whole = self._body(body)
        if whole is not None:
            self._write(source, page=whole, first=first)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _body(self, text: bytes) -> Raw | None:
        """The same JSON on one line; None if it is none."""
        try:
            return redacted(text) if self._redacts else _json(msgspec.json.format(text, indent=-1))
        except (ValueError, RecursionError):
            return None

    def _write(
        self,
        source: str,
        *,
        opens: bool = False,
        first: bool = False,
        frame: Raw = _NOTHING,
        text: str = "",
        page: Raw = _NOTHING,
    ) -> None:
        line = Line(
            time=datetime.now(UTC),
            resource=resource_of(source.partition("?")[0]),
            source=source,
            opens=opens,
            first=first,
            frame=frame,
            text=text,
            page=page,
        )
        self._put(_encode(line))

    def _put(self, text: bytes) -> None:
        if self.full.is_set() or len(text) + 1 > self._left:
            self.full.set()
            return
        self._left -= len(text) + 1
        self.lines += 1
        self._file.write(text + b"\n")
        self._file.flush()


def read(file: BinaryIO | io.BytesIO) -> tuple[Head, Iterator[Line]]:
    """Head and lines of a recording. Raises TapeError, also while lines are read.

    A last line that was cut off, as the recording process was killed, is left out.
    """
    try:
        head = _head(file.readline())
    except msgspec.DecodeError as error:
        raise TapeError(f"line 1 is not the head of a recording: {error}") from None
    if head.recording != VERSION:
        raise TapeError(f"a recording of version {head.recording}; this reads version {VERSION}")
    return head, _lines(file)


def _lines(file: BinaryIO | io.BytesIO) -> Iterator[Line]:
    for number, text in enumerate(file, start=2):
        if not text.endswith(b"\n"):
            return
        try:
            yield _line(text)
        except msgspec.DecodeError as error:
            raise TapeError(f"line {number} cannot be read: {error}") from None
