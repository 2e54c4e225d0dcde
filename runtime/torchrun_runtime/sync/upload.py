"""The upload of an archive to the PVC, in pieces, over several connections and pods.

Two files outlive the pod: the received bytes, and the identity of the archive (digest and total
length). The length of the first is the offset. The digest is updated with each piece, so that the
last byte completes the check.

One connection writes at a time. A newer one that continues at the right offset takes over, so that
a client that lost its connection need not wait for the timeout of the old one.
"""

import hashlib
import json
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from torchrun_runtime.sync.claim import write_durably
from torchrun_runtime.sync.errors import FULL, LARGER_CLAIM, UploadError

_PIECE = 1 << 20


@dataclass(frozen=True)
class Identity:
    """One archive: digest in hex, length in bytes.

    workspace: digest of the manifest whose missing contents the archive has; "" if the archive is
    the whole workspace.
    """

    sha256: str
    total: int
    workspace: str = ""


class ReceivedUpload:
    """The received bytes of one archive. Every method may be called from any thread.

    Invariants: `offset` is the length of the file and the number of bytes in the digest;
    without an identity there is no file.
    """

    def __init__(self, directory: Path, limit: int, required_digest: str = "") -> None:
        self.archive = directory / "archive.zip"
        self._sidecar = directory / "upload.json"
        self._limit = limit
        self._required_digest = required_digest
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self._writer: object = None
        self.identity: Identity | None = None
        self.offset = 0
        self._resume()

    @property
    def complete(self) -> bool:
        """Whether all bytes are received and have the announced digest."""
        with self._lock:
            return self._complete()

    def begin(self, identity: Identity, start: int) -> object:
        """Take over the upload at byte `start` and return the writer's token.

        Raises UploadError: 409 with the current offset if it is not `start`; 413, 422, 507.
        """
        with self._lock:
            self._check(identity)
            if identity != self.identity:
                if start != 0:
                    raise _wrong_offset(0)
                self._check_space(identity.total, freed=self.offset)
                self._clear()
                self._store_identity(identity)
            elif start != self.offset:
                raise _wrong_offset(self.offset)
            else:
                self._check_space(identity.total - self.offset)
            self._writer = object()
            return self._writer

    def append(self, writer: object, data: bytes) -> int:
        """Add bytes and return the new offset.

        Raises UploadError: 409 if another writer has taken over, 507 if the disk is full (the
        written bytes are kept).
        """
        with self._lock:
            if writer is not self._writer or self.identity is None:
                raise _wrong_offset(self.offset)
            view = memoryview(data)
            try:
                with self.archive.open("ab", buffering=0) as file:
                    while view:
                        size = file.write(view) or 0
                        self._digest.update(view[:size])
                        self.offset += size
                        view = view[size:]
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise _disk_full(len(view), 0, self.offset) from error
            return self.offset

    def finish(self, writer: object) -> bool:
        """Whether the archive is complete now.

        Raises UploadError 422 if all bytes are received and the digest is wrong. All bytes are
        dropped, because it is unknown which of them are wrong.
        """
        with self._lock:
            if writer is not self._writer or self.identity is None:
                raise _wrong_offset(self.offset)
            if self.offset < self.identity.total:
                return False
            if self._complete():
                self._writer = None
                return True
            message = (
                f"The {self.offset} bytes that were received have SHA-256"
                f" {self._digest.hexdigest()}, not {self.identity.sha256}. Send the archive again."
            )
            self._clear()
            raise UploadError(422, "DigestMismatch", message, offset=0)

    def discard(self) -> None:
        """Drop all bytes."""
        with self._lock:
            self._clear()

    def _complete(self) -> bool:
        identity = self.identity
        return (
            identity is not None
            and self.offset == identity.total
            and self._digest.hexdigest() == identity.sha256
        )

    def _check(self, identity: Identity) -> None:
        refuse_other(self._required_digest, identity.workspace or identity.sha256)
        if identity.total > self._limit:
            message = (
                f"The archive has {identity.total} bytes. The limit is {self._limit}. Move data out"
                " of the workspace and mount it from a PVC."
            )
            raise UploadError(413, "WorkspaceTooLarge", message)

    def _check_space(self, needed: int, freed: int = 0) -> None:
        free = shutil.disk_usage(self.archive.parent).free + freed
        if needed > free:
            raise _disk_full(needed, free, self.offset)

    def _store_identity(self, identity: Identity) -> None:
        try:
            write_durably(self._sidecar, json.dumps(asdict(identity)).encode())
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise _disk_full(identity.total, 0, 0) from error
        self.identity = identity

    def _clear(self) -> None:
        self.archive.unlink(missing_ok=True)
        self._sidecar.unlink(missing_ok=True)
        self.identity = None
        self.offset = 0
        self._digest = hashlib.sha256()
        self._writer = None

    def _resume(self) -> None:
        """Resume the upload of an earlier pod; drop it if its files are inconsistent."""
        try:
            identity = Identity(**json.loads(self._sidecar.read_bytes()))
            self._check(identity)
            with self.archive.open("rb") as file:
                while piece := file.read(_PIECE):
                    self._digest.update(piece)
                    self.offset += len(piece)
        except (FileNotFoundError, ValueError, TypeError, UploadError):
            self._clear()
            return
        self.identity = identity
        if self.offset > identity.total or (self.offset == identity.total and not self._complete()):
            self._clear()


def refuse_other(required_digest: str, sha256: str) -> None:
    """Raises UploadError if the job requires another workspace."""
    if required_digest and sha256 != required_digest:
        message = (
            f"This job accepts only the workspace that it was submitted with, not the one with"
            f" SHA-256 {sha256}. Submit a new job to run other code."
        )
        raise UploadError(422, "WrongArchive", message)


def _wrong_offset(offset: int) -> UploadError:
    message = f"The pod has {offset} bytes. Continue from there."
    return UploadError(409, "WrongOffset", message, offset=offset)


def _disk_full(needed: int, free: int, offset: int) -> UploadError:
    message = (
        f"The workspace PVC is full: the upload needs {needed} more bytes and {free} are free."
        f" {LARGER_CLAIM} or make the archive smaller."
    )
    return UploadError(507, "WorkspaceFull", message, offset=offset)
