"""Fetch the workspace from the job's serve pod, if the job has no shared storage.

First the manifest, which must have the announced SHA-256, then the contents of missing files, each
checked by its digest. After an interruption the next request continues with the next file.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import stat
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from contextlib import suppress
from functools import partial
from typing import Callable, Iterable, NamedTuple, TypeVar

from .contract import LARGEST_MANIFEST
from .errors import LaunchError
from .manifest import Entry, parse
from .output import counted, say, wait_until
from .workspace import modified, outdated, remove, show_as_newer

T = TypeVar("T")

_BLOCK = 1 << 20
# The server serves some workers of a large gang at a time; the others wait for a response.
_SILENCE_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_LOOK = 0.2
# Status codes that a retry would only repeat. Not 401: tokens and keys may arrive late.
_FINAL = (400, 404, 409)


class Server(NamedTuple):
    """url: of the server; token: file of the pod's token; manifest: SHA-256 of the manifest."""

    url: str
    token: str
    manifest: str


class ReplacedError(Exception):
    """Another serve pod has replaced the server."""


class _BrokenError(Exception):
    """A failed attempt. A retry may succeed."""


def fetch(
    server: Server,
    target: str,
    seconds: float,
    copied: dict[str, Entry] | None = None,
    replaced: Callable[[], bool] = lambda: False,
) -> None:
    """Fetch the workspace into `target`; gives up after `seconds` without progress.

    copied: entries of the previous workspace by path, updated in place; those that are not in the
    new one are removed first. replaced: whether another server has replaced this one.

    Raises LaunchError: WorkspaceNotReady, WorkspaceCopyFailed if `target` cannot be written.
    ReplacedError.
    """
    start = time.monotonic()
    copied = {} if copied is None else copied
    try:
        entries = _retry(partial(_manifest, server), seconds, replaced)
        by_path = {entry.path: entry for entry in entries}
        remove(target, outdated(copied, by_path))
        copied.clear()
        copied.update(by_path)
        _make_directories(target, entries)
        missing = _missing(target, entries)
        while missing:
            request = partial(_fetch_files, server, target, entries, missing)
            missing = _retry(request, seconds, replaced)
    except OSError as error:
        message = f"Cannot write the workspace to {target}: {error}."
        raise LaunchError("WorkspaceCopyFailed", message) from error
    size = sum(entry.size for entry in entries)
    elapsed = time.monotonic() - start
    say(f"workspace: {counted(len(entries))}, {size} bytes from {server.url} ({elapsed:.1f} s)")


def _retry(step: Callable[[], T], seconds: float, replaced: Callable[[], bool]) -> T:
    """Retry until it succeeds, for `seconds`. Raises LaunchError, ReplacedError."""
    start, pause = time.monotonic(), _FIRST_PAUSE
    while True:
        try:
            return step()
        except _BrokenError as error:
            if time.monotonic() - start + pause >= seconds:
                message = f"The workspace was not delivered within {seconds:.0f} s: {error}."
                raise LaunchError("WorkspaceNotReady", message) from error
            say(f"workspace: {error}; retrying in {pause:.1f} s")
        if wait_until(replaced, pause, "the server", pause=_LOOK):
            raise ReplacedError
        pause = min(pause * 2, _LONGEST_PAUSE)


def _manifest(server: Server) -> list[Entry]:
    """The entries of the server's manifest, with directories."""
    with _request(server, "/v1/manifest") as answer:
        unpack = zlib.decompressobj()
        try:
            text = unpack.decompress(_read(answer), LARGEST_MANIFEST)
        except zlib.error as error:
            raise _BrokenError(f"the manifest is damaged: {error}") from error
    if unpack.unconsumed_tail or not unpack.eof:
        raise _BrokenError("the manifest is too large or incomplete")
    digest = hashlib.sha256(text).hexdigest()
    if digest != server.manifest:
        raise LaunchError(
            "WorkspaceNotReady",
            f"{server.url} has the workspace with manifest {digest}. This attempt started with"
            f" {server.manifest}.",
        )
    return parse(text.decode())


def _make_directories(target: str, entries: list[Entry]) -> None:
    for entry in entries:
        if entry.path.startswith("/") or ".." in entry.path.split("/"):
            raise LaunchError(
                "WorkspaceNotReady", f"The manifest has the invalid path {entry.path!r}."
            )
        directory = os.path.dirname(entry.path) if entry.is_file else entry.path
        os.makedirs(os.path.join(target, directory), exist_ok=True)


def _missing(target: str, entries: list[Entry]) -> list[int]:
    """Numbers of the files that no earlier attempt or start of this container has fetched."""
    return [
        number
        for number, entry in enumerate(entries)
        if entry.is_file and not _is_here(target, entry)
    ]


def _is_here(target: str, file: Entry) -> bool:
    """Whether the file has this content. It then gets this mode, too."""
    path = os.path.join(target, file.path)
    try:
        if os.path.getsize(path) != file.size:
            return False
        digest = hashlib.sha256()
        with open(path, "rb") as content:
            for block in iter(lambda: content.read(_BLOCK), b""):
                digest.update(block)
        if digest.hexdigest() != file.sha256:
            return False
        if stat.S_IMODE(os.stat(path).st_mode) != _mode(file):
            os.chmod(path, _mode(file))
    except OSError:
        return False
    return True


def _mode(file: Entry) -> int:
    """The permission bits of its copy, which a later fetch replaces."""
    return file.mode | stat.S_IWUSR


def _fetch_files(
    server: Server, target: str, entries: list[Entry], numbers: list[int]
) -> list[int]:
    """Fetch these entries in this order; returns those that did not arrive.

    Raises _BrokenError if none arrived.
    """
    selection = {"manifest": server.manifest, "entries": _ranges(numbers)}
    fetched = 0
    try:
        with _request(server, "/v1/files", json.dumps(selection).encode()) as answer:
            for number in numbers:
                entry = entries[number]
                _write_file(answer, os.path.join(target, entry.path), entry)
                fetched += 1
    except _BrokenError as error:
        if not fetched:
            raise
        say(f"workspace: {error}; continuing after {counted(fetched)}")
    return numbers[fetched:]


def _write_file(answer: http.client.HTTPResponse, path: str, file: Entry) -> None:
    """Write one file atomically. Any name of a file may be one of the workspace."""
    descriptor, temporary = tempfile.mkstemp(prefix=".torchrun-", dir=os.path.dirname(path))
    digest = hashlib.sha256()
    remaining = file.size
    try:
        with os.fdopen(descriptor, "wb") as output:
            while remaining:
                block = _read(answer, min(_BLOCK, remaining))
                if not block:
                    raise _BrokenError(f"{file.path} is incomplete")
                digest.update(block)
                output.write(block)
                remaining -= len(block)
        if digest.hexdigest() != file.sha256:
            raise _BrokenError(f"{file.path} was damaged during the download")
        os.chmod(temporary, _mode(file))
        before = modified(path)
        os.replace(temporary, path)
        show_as_newer(path, before)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error, because the token is only for the server of the job."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _request(server: Server, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
    """A response of the server. Raises _BrokenError, LaunchError for a permanent refusal."""
    # No proxy: that of the user's environment is not for addresses of pods.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        # Read for each request, because the kubelet renews it.
        with open(server.token, encoding="utf-8") as file:
            token = file.read().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(server.url + path, body, headers)  # noqa: S310
        answer: http.client.HTTPResponse = opener.open(request, timeout=_SILENCE_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            reply = error.read(2000).decode("utf-8", "replace")
        message = f"{server.url} returned HTTP {error.code}: {reply}"
        if error.code in _FINAL:
            raise LaunchError("WorkspaceNotReady", message) from error
        raise _BrokenError(message) from error
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"cannot reach {server.url}: {error}") from error
    return answer


def _read(answer: http.client.HTTPResponse, size: int | None = None) -> bytes:
    """Up to `size` bytes, all if None."""
    try:
        return answer.read(size)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"the connection broke: {error!r}") from error


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as ranges, ends included."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
