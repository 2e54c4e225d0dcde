"""An archive on its way onto the claim, in pieces, over as many connections and pods as it takes.

Two files hold all that must survive: the bytes so far, and whose they are (digest and length of
the whole). The length of the first is the offset. A digest is kept running over the bytes, so that
the last of them decides at once.

One connection writes at a time. A newer one that goes on from the right offset takes over, so that
a client whose connection died without a word need not wait for the old one's timeout.
"""

import errno
import hashlib
import json
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from torchrun_runtime.sync.claim import write_durably
from torchrun_runtime.sync.errors import UploadError

_PIECE = 1 << 20

# What a file system says when nothing more fits: also a quota, also a claim of NFS.
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Identity:
    """Of one archive: digest in hex, length in bytes.

    workspace: digest of the manifest whose missing contents it brings, "" where it is all there is.
    """

    sha256: str
    total: int
    workspace: str = ""


class Upload:
    """Bytes held of one archive. Every method may be called from any thread.

    Invariants: `offset` is the length of the file and the number of bytes in the digest;
    without an identity there is no file.
    """

    def __init__(self, directory: Path, limit: int, wanted: str = "") -> None:
        self.archive = directory / "archive.zip"
        self._sidecar = directory / "upload.json"
        self._limit = limit
        self._wanted = wanted
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self._writer: object = None
        self.identity: Identity | None = None
        self.offset = 0
        self._resume()

    @property
    def complete(self) -> bool:
        """Whether every byte is held and the digest is the promised one."""
        with self._lock:
            return self._complete()

    def begin(self, identity: Identity, start: int) -> object:
        """Take over the upload at byte `start` and return the writer's token.

        Raises UploadError: 409 with the offset held where it is not `start`; 413, 422, 507.
        """
        with self._lock:
            self._check(identity)
            if identity != self.identity:
                if start != 0:
                    raise _wrong_offset(0)
                self._check_space(identity.total, freed=self.offset)
                self._forget()
                self._remember(identity)
            elif start != self.offset:
                raise _wrong_offset(self.offset)
            else:
                self._check_space(identity.total - self.offset)
            self._writer = object()
            return self._writer

    def append(self, writer: object, data: bytes) -> int:
        """Add bytes and return the new offset.

        Raises UploadError: 409 where another writer has taken over, 507 where the disk is full
        (what fitted is kept).
        """
        with self._lock:
            if writer is not self._writer or self.identity is None:
                raise _wrong_offset(self.offset)
            view = memoryview(data)
            try:
                with self.archive.open("ab", buffering=0) as file:
                    while view:
                        written = file.write(view) or 0
                        self._digest.update(view[:written])
                        self.offset += written
                        view = view[written:]
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise _disk_full(len(view), 0, self.offset) from error
            return self.offset

    def finish(self, writer: object) -> bool:
        """Whether the archive is complete now.

        Raises UploadError 422 where the last byte is in and the digest is wrong; the bytes are
        dropped, as nobody can tell which of them is.
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
                f"the {self.offset} bytes received have sha256 {self._digest.hexdigest()}, "
                f"announced was {self.identity.sha256}; send the archive again"
            )
            self._forget()
            raise UploadError(422, "DigestMismatch", message, offset=0)

    def discard(self) -> None:
        """Drop all bytes held."""
        with self._lock:
            self._forget()

    def _complete(self) -> bool:
        identity = self.identity
        return (
            identity is not None
            and self.offset == identity.total
            and self._digest.hexdigest() == identity.sha256
        )

    def _check(self, identity: Identity) -> None:
        refuse_other(self._wanted, identity.workspace or identity.sha256)
        if identity.total > self._limit:
            message = (
                f"the archive has {identity.total} bytes, allowed are {self._limit}; "
                "leave data out of the workspace and mount it from a claim"
            )
            raise UploadError(413, "ArchiveTooLarge", message)

    def _check_space(self, needed: int, freed: int = 0) -> None:
        free = shutil.disk_usage(self.archive.parent).free + freed
        if needed > free:
            raise _disk_full(needed, free, self.offset)

    def _remember(self, identity: Identity) -> None:
        try:
            write_durably(self._sidecar, json.dumps(asdict(identity)).encode())
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise _disk_full(identity.total, 0, 0) from error
        self.identity = identity

    def _forget(self) -> None:
        self.archive.unlink(missing_ok=True)
        self._sidecar.unlink(missing_ok=True)
        self.identity = None
        self.offset = 0
        self._digest = hashlib.sha256()
        self._writer = None

    def _resume(self) -> None:
        """Take up what an earlier pod held; drop it where it does not fit together."""
        try:
            identity = Identity(**json.loads(self._sidecar.read_bytes()))
            self._check(identity)
            with self.archive.open("rb") as file:
                while piece := file.read(_PIECE):
                    self._digest.update(piece)
                    self.offset += len(piece)
        except (FileNotFoundError, ValueError, TypeError, UploadError):
            self._forget()
            return
        self.identity = identity
        if self.offset > identity.total or (self.offset == identity.total and not self._complete()):
            self._forget()


def refuse_other(wanted: str, sha256: str) -> None:
    """Raises UploadError where the job names another workspace than this one."""
    if wanted and sha256 != wanted:
        message = (
            f"this job takes another workspace than the one with sha256 {sha256};"
            " submit the job again to run other code"
        )
        raise UploadError(422, "WrongArchive", message)


def _wrong_offset(offset: int) -> UploadError:
    message = f"{offset} bytes are held; go on from there"
    return UploadError(409, "WrongOffset", message, offset=offset)


def _disk_full(needed: int, free: int, offset: int) -> UploadError:
    message = (
        f"the workspace claim is full: {needed} more bytes are needed, {free} are free; "
        "make the archive smaller or raise volumes.workspace.size, then try again"
    )
    return UploadError(507, "WorkspaceFull", message, offset=offset)
