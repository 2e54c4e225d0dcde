"""The workspace from the job's own server, where the job has no shared storage.

First the manifest, which must be the one that the pod was told of, then the contents of the files
that are not here yet, each checked by its digest. What breaks off goes on with the next file.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
import zlib
from contextlib import suppress
from functools import partial
from typing import Callable, Iterable, NamedTuple, TypeVar

from .errors import LaunchError
from .output import counted, say, wait_until
from .workspace import modified, remove, show_as_newer

T = TypeVar("T")

_BLOCK = 1 << 20
# Of a large gang only some are served at a time; the others hear nothing until it is their turn.
_SILENCE_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_LOOK = 0.2
_LARGEST_MANIFEST = 128 << 20  # bytes, as the sync program takes it
# Answers that another try would only repeat. (Tokens and keys may be late: 401 passes.)
_FINAL = (400, 404, 409)


class Server(NamedTuple):
    """url: of the server; token: file of the pod's token; manifest: SHA-256 of what is wanted."""

    url: str
    token: str
    manifest: str


class _File(NamedTuple):
    """number: of its line in the manifest."""

    number: int
    path: str
    sha256: str
    size: int
    mode: int


class ReplacedError(Exception):
    """The server has a successor, which has what is wanted by now."""


class _BrokenError(Exception):
    """A try that came to nothing; the next one may do better."""


def fetch(
    server: Server,
    target: str,
    seconds: float,
    held: set[str] | None = None,
    replaced: Callable[[], bool] = lambda: False,
) -> None:
    """Bring the workspace into `target`; `seconds` may pass without any progress.

    held: paths that came with workspaces before. Those that this one lacks are removed, and the set
    is made its own. replaced: whether another server is to be asked.

    Raises LaunchError: WorkspaceNotDelivered, WorkspaceCopyFailed where `target` takes no files.
    ReplacedError.
    """
    start = time.monotonic()
    held = set() if held is None else held
    try:
        files = _patiently(partial(_manifest, server), seconds, replaced)
        listed = {file.path for file in files}
        gone = held - listed
        held |= listed
        _make_directories(target, files)
        missing = _absent(target, files)
        while missing:
            missing = _patiently(partial(_some, server, target, missing), seconds, replaced)
        remove(target, gone)
        held -= gone
    except OSError as error:
        message = f"cannot write the workspace to {target}: {error}"
        raise LaunchError("WorkspaceCopyFailed", message) from error
    size = sum(file.size for file in files)
    passed = time.monotonic() - start
    say(f"workspace: {counted(len(files))}, {size} bytes from {server.url} ({passed:.1f} s)")


def _patiently(step: Callable[[], T], seconds: float, replaced: Callable[[], bool]) -> T:
    """Try until it works, for `seconds`. Raises LaunchError, ReplacedError."""
    start, pause = time.monotonic(), _FIRST_PAUSE
    while True:
        try:
            return step()
        except _BrokenError as error:
            if time.monotonic() - start + pause >= seconds:
                message = f"the workspace was not delivered within {seconds:.0f} s: {error}"
                raise LaunchError("WorkspaceNotDelivered", message) from error
            say(f"workspace: {error}; trying again in {pause:.1f} s")
        if wait_until(replaced, pause, "the server", pause=_LOOK):
            raise ReplacedError
        pause = min(pause * 2, _LONGEST_PAUSE)


def _manifest(server: Server) -> list[_File]:
    """Its entries, directories too."""
    with _request(server, "/v1/manifest") as answer:
        unpack = zlib.decompressobj()
        try:
            text = unpack.decompress(_read(answer), _LARGEST_MANIFEST)
        except zlib.error as error:
            raise _BrokenError(f"the manifest is damaged: {error}") from error
    if unpack.unconsumed_tail or not unpack.eof:
        raise _BrokenError("the manifest is too large, or was cut off")
    digest = hashlib.sha256(text).hexdigest()
    if digest != server.manifest:
        raise LaunchError(
            "WorkspaceNotDelivered",
            f"{server.url} has the workspace of manifest {digest} and not {server.manifest}, with "
            "which this attempt began",
        )
    lines = (line.split(" ", 3) for line in text.decode().split("\n") if line)
    return [
        _File(number, path, sha256, int(size), 0 if mode == "dir" else int(mode, 8))
        for number, (sha256, size, mode, path) in enumerate(lines)
    ]


def _make_directories(target: str, entries: list[_File]) -> None:
    for entry in entries:
        if entry.path.startswith("/") or ".." in entry.path.split("/"):
            raise LaunchError("WorkspaceNotDelivered", f"the manifest names {entry.path!r}")
        directory = os.path.dirname(entry.path) if entry.mode else entry.path
        os.makedirs(os.path.join(target, directory), exist_ok=True)


def _absent(target: str, entries: list[_File]) -> list[_File]:
    """The files that no earlier try, and no earlier start of this container, has brought."""
    return [entry for entry in entries if entry.mode and not _is_here(target, entry)]


def _is_here(target: str, file: _File) -> bool:
    path = os.path.join(target, file.path)
    try:
        if os.path.getsize(path) != file.size:
            return False
        digest = hashlib.sha256()
        with open(path, "rb") as held:
            for block in iter(lambda: held.read(_BLOCK), b""):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() == file.sha256


def _some(server: Server, target: str, files: list[_File]) -> list[_File]:
    """Take the files in this order; those that did not come. Raises _BrokenError if none did."""
    wanted = {"manifest": server.manifest, "entries": _ranges(file.number for file in files)}
    taken = 0
    try:
        with _request(server, "/v1/files", json.dumps(wanted).encode()) as answer:
            for file in files:
                _take(answer, os.path.join(target, file.path), file)
                taken += 1
    except _BrokenError as error:
        if not taken:
            raise
        say(f"workspace: {error}; going on after {counted(taken)}")
    return files[taken:]


def _take(answer: http.client.HTTPResponse, path: str, file: _File) -> None:
    """One file, which is there whole or not at all."""
    temporary = f"{path}.torchrun-new"
    digest = hashlib.sha256()
    left = file.size
    try:
        with open(temporary, "wb") as made:
            while left:
                block = _read(answer, min(_BLOCK, left))
                if not block:
                    raise _BrokenError(f"{file.path} was cut off")
                digest.update(block)
                made.write(block)
                left -= len(block)
        if digest.hexdigest() != file.sha256:
            raise _BrokenError(f"{file.path} came damaged")
        os.chmod(temporary, file.mode | 0o200)
        before = modified(path)
        os.replace(temporary, path)
        show_as_newer(path, before)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The token is for the server of the job alone: a redirect is an error, not followed."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _request(server: Server, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
    """An answer of the server. Raises _BrokenError, LaunchError where it refuses for good."""
    # A proxy of the user's environment is not for addresses of pods.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        # Read for each request: the kubelet renews it.
        with open(server.token, encoding="utf-8") as file:
            token = file.read().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(server.url + path, body, headers)  # noqa: S310
        answer: http.client.HTTPResponse = opener.open(request, timeout=_SILENCE_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            told = error.read(2000).decode("utf-8", "replace")
        message = f"{server.url} answers {error.code}: {told}"
        if error.code in _FINAL:
            raise LaunchError("WorkspaceNotDelivered", message) from error
        raise _BrokenError(message) from error
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"{server.url} cannot be reached: {error}") from error
    return answer


def _read(answer: http.client.HTTPResponse, size: int | None = None) -> bytes:
    """Up to `size` bytes, all if None."""
    try:
        return answer.read(size)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"the connection broke: {error!r}") from error


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as ranges with both ends in them."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found
