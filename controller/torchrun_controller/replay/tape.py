"""The file format of a recording: JSON lines, the first one is the head."""

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
from torchrun_controller.replay.redact import redact

VERSION = 1
_SELECTORS = ("labelSelector", "fieldSelector")
_EMPTY = Raw(b"")
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class TapeError(Exception):
    """The file is not a recording of this version; the message names the invalid line."""


class Head(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The first line.

    `recording` is the version of the format, `controller` that of the recording controller. `time`
    is the start, `namespaces` are the watched ones, () for all. `redacted`: see `redact`.
    """

    recording: int = VERSION
    controller: str = ""
    time: datetime
    namespaces: tuple[str, ...] = ()
    redacted: bool = False


class Line(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message of the API server, received at `time`.

    `source` is path and selectors of the request (see `source_of`), `resource` its resource
    ("jobs.batch"). One of these fields is set: `opens` at the start of a streamed list, `frame` for
    an event of a watch, `text` for one that is not JSON, `page` for the body of a GET. `first` is
    set with `page`, except for the later pages of a list.
    """

    time: datetime
    resource: str
    source: str
    opens: bool = False
    first: bool = False
    frame: Raw = _EMPTY
    text: str = ""
    page: Raw = _EMPTY


_encode = msgspec.json.Encoder().encode
_head = msgspec.json.Decoder(Head).decode
_line = msgspec.json.Decoder(Line).decode
_json = msgspec.json.Decoder(Raw).decode


def source_of(path: str, query: Mapping[str, str]) -> str:
    """Return the identity of a watch: its path, and its label and field selectors."""
    selectors = {name: query[name] for name in _SELECTORS if query.get(name)}
    return f"{path}?{urlencode(selectors)}" if selectors else path


class Tape:
    """Writes a recording of at most `limit` bytes. Call `close` at the end.

    `full` is set when a line exceeds the limit; this and later lines are dropped. `lines` is the
    number of written lines. Raises FileExistsError if the file exists, and OSError. The file is
    readable for its owner only.
    """

    def __init__(self, path: Path, head: Head, limit: int) -> None:
        self.full = anyio.Event()
        self.lines = 0
        self._bytes_left = limit
        self._redacts = head.redacted
        self._file: BinaryIO = os.fdopen(os.open(path, _CREATE_FLAGS, 0o600), "wb")
        self._put(_encode(head))

    def opens(self, source: str) -> None:
        """Record that the server starts to stream a list."""
        self._write(source, opens=True)

    def frame(self, source: str, line: bytes) -> None:
        """Record one line of a watch. If it is not JSON, a redacted recording has no text."""
        body = self._body(line)
        if body is None:
            self._write(source, text="" if self._redacts else line.decode(errors="replace"))
        else:
            self._write(source, frame=body)

    def page(self, source: str, body: bytes, *, first: bool) -> None:
        """Record the body of a GET; it is dropped if it is not JSON."""
        json = self._body(body)
        if json is not None:
            self._write(source, page=json, first=first)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _body(self, text: bytes) -> Raw | None:
        """Return the JSON on one line; None if it is not JSON."""
        try:
            return redact(text) if self._redacts else _json(msgspec.json.format(text, indent=-1))
        except (ValueError, RecursionError):
            return None

    def _write(
        self,
        source: str,
        *,
        opens: bool = False,
        first: bool = False,
        frame: Raw = _EMPTY,
        text: str = "",
        page: Raw = _EMPTY,
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
        if self.full.is_set() or len(text) + 1 > self._bytes_left:
            self.full.set()
            return
        self._bytes_left -= len(text) + 1
        self.lines += 1
        self._file.write(text + b"\n")
        self._file.flush()


def read(file: BinaryIO | io.BytesIO) -> tuple[Head, Iterator[Line]]:
    """Return the head and an iterator over the lines of a recording.

    Raises TapeError, also from the iterator. An incomplete last line is dropped: the recording
    process may have been killed.
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
