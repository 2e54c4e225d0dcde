"""The node's copy of the workspace from a serve pod of the job, for jobs without shared storage.

The environment has the URL of the serve pod and its manifest. A newer revision may be on another
serve pod: an annotation of the worker then has its URL and manifest, and so has the leader's order.

`fetch` gets the manifest first, which must have the announced SHA-256, then the contents of missing
files, each checked by its digest. After an interruption the next request continues with the next
file.
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

from . import podinfo
from .cause import LaunchError
from .contract import LARGEST_MANIFEST, REVISION_ANNOTATION, SERVED_ANNOTATION
from .output import counted, say, wait_until
from .workspace import ManifestEntry, modified, outdated, parse, remove, show_as_newer

# Wait for the annotation with another server, after the current one has failed.
_ANNOTATION_SECONDS = 10.0
T = TypeVar("T")

_BLOCK = 1 << 20
# The server serves some workers of a large gang at a time; the others wait for a response.
_SILENCE_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_LOOK = 0.2
# Status codes that a retry would only repeat. Not 401: tokens and keys may arrive late.
_FINAL = (400, 404, 409)


class ServedWorkspace:
    """A WorkspaceCopy of the workspace of a serve pod."""

    def __init__(self, first: Server, podinfo: str, target: str, seconds: float) -> None:
        self.revision = 0
        self._first = first
        self._podinfo = podinfo
        self._target = target
        self._seconds = seconds
        self._copied: dict[str, ManifestEntry] = {}
        self._manifest = ""
        self._ordered = (0, "")  # revision and address in the order of the leader

    def newest_revision(self) -> int:
        """The current one: only the controller announces another."""
        return self.revision

    def accept_unchanged(self, revision: int, served: str = "") -> bool:
        """Set the current revision to the announced one if it has the same manifest."""
        self._order(revision, served)
        announced, server = self._announced()
        if server.manifest != self._manifest:
            return False
        self.revision = max(revision, announced)
        return True

    def update(self, revision: int = 0, served: str = "") -> None:
        """Fetch the differences to the announced manifest. Raises LaunchError.

        The revision of the copy is then the announced one, which may be newer than `revision`.
        """
        self._order(revision, served)
        while True:
            announced, server = self._announced()
            try:
                self._fetch(server)
                break
            except ReplacedError:
                continue
            except LaunchError:
                if not self._is_replaced(server, _ANNOTATION_SECONDS):
                    raise
        self._manifest = server.manifest
        self.revision = max(revision, announced)

    def _fetch(self, server: Server) -> None:
        fetch(
            server,
            self._target,
            self._seconds,
            self._copied,
            lambda: self._is_replaced(server, 0.0),
        )

    def _is_replaced(self, server: Server, seconds: float) -> bool:
        return wait_until(
            lambda: self._announced()[1] != server, seconds, "the address of another serve pod"
        )

    def _order(self, revision: int, served: str) -> None:
        if served:
            self._ordered = revision, served

    def _announced(self) -> tuple[int, Server]:
        """The newest revision and its server, from the annotation or from the order."""
        revision, served = self._ordered
        values = podinfo.values(self._podinfo)
        annotated = podinfo.to_number(values.get(REVISION_ANNOTATION, ""))
        if annotated >= revision:
            revision, served = annotated, values.get(SERVED_ANNOTATION, "")
        url, _, manifest = served.partition(" ")
        return revision, Server(url, self._first.token, manifest) if manifest else self._first


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
    copied: dict[str, ManifestEntry] | None = None,
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


def _manifest(server: Server) -> list[ManifestEntry]:
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


def _make_directories(target: str, entries: list[ManifestEntry]) -> None:
    for entry in entries:
        if entry.path.startswith("/") or ".." in entry.path.split("/"):
            raise LaunchError(
                "WorkspaceNotReady", f"The manifest has the invalid path {entry.path!r}."
            )
        directory = os.path.dirname(entry.path) if entry.is_file else entry.path
        os.makedirs(os.path.join(target, directory), exist_ok=True)


def _missing(target: str, entries: list[ManifestEntry]) -> list[int]:
    """Numbers of the files that no earlier attempt or start of this container has fetched."""
    return [
        number
        for number, entry in enumerate(entries)
        if entry.is_file and not _is_here(target, entry)
    ]


def _is_here(target: str, file: ManifestEntry) -> bool:
    """Whether the file has this content. If so, the file gets this mode."""
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


def _mode(file: ManifestEntry) -> int:
    """The permission bits of its copy, which a later fetch replaces."""
    return file.mode | stat.S_IWUSR


def _fetch_files(
    server: Server, target: str, entries: list[ManifestEntry], numbers: list[int]
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


def _write_file(answer: http.client.HTTPResponse, path: str, file: ManifestEntry) -> None:
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
