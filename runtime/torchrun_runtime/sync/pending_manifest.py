"""The manifest of a workspace during its upload. It arrives before the contents."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchrun_api.contract.contents import Entry, Manifest, ManifestError, parse, unpack
from torchrun_runtime.sync.archives.zip import refuse_size
from torchrun_runtime.sync.claim import write_durably
from torchrun_runtime.sync.errors import FULL, LARGER_CLAIM, ArchiveError, UploadError
from torchrun_runtime.sync.paths import PlannedPath, components, refuse_collisions, refused
from torchrun_runtime.sync.settings import ArchiveLimits
from torchrun_runtime.sync.upload import refuse_other


class PendingManifest:
    """At most one manifest, in a file that outlives the pod.

    bases: manifests by sha256, to which a client may send a difference. required_digest: sha256
    of the only accepted manifest, or "".
    """

    def __init__(
        self,
        directory: Path,
        limits: ArchiveLimits,
        bases: Mapping[str, Manifest],
        required_digest: str,
    ) -> None:
        self._file = directory / "manifest"
        self._limits = limits
        self._bases = bases
        self._required_digest = required_digest
        self.manifest: Manifest | None = None
        with suppress(OSError, ValueError):
            stored = parse(self._file.read_text())
            if required_digest in ("", stored.sha256):
                self.manifest = stored

    @property
    def base(self) -> str:
        """The base manifest that a client should send a difference to; "" for none."""
        return next(iter(self._bases), "")

    @property
    def sha256(self) -> str:
        """Digest of the manifest; "" for none."""
        return self.manifest.sha256 if self.manifest else ""

    def take(self, sha256: str, data: bytes) -> None:
        """Accept the output of `contents.pack`.

        Raises UploadError: 409 ManifestNeeded (send it whole), 422 if it is not acceptable.
        """
        refuse_other(self._required_digest, sha256)
        try:
            manifest = unpack(data, self._bases)
        except ManifestError as error:
            raise UploadError(409, "ManifestNeeded", str(error)) from error
        if manifest.sha256 != sha256:
            message = f"The manifest has SHA-256 {manifest.sha256}, not {sha256}."
            raise UploadError(409, "ManifestNeeded", message)
        try:
            _check(manifest, self._limits)
        except ArchiveError as error:
            raise UploadError(422, error.reason, error.message) from error
        try:
            write_durably(self._file, manifest.text.encode())
        except OSError as error:
            if error.errno not in FULL:
                raise
            message = f"The workspace PVC is full. {LARGER_CLAIM}."
            raise UploadError(507, "WorkspaceFull", message) from error
        self.manifest = manifest

    def discard(self) -> None:
        """Drop the manifest."""
        self._file.unlink(missing_ok=True)
        self.manifest = None


def _check(manifest: Manifest, limits: ArchiveLimits) -> None:
    """Raises ArchiveError with the first entry that is not acceptable."""
    if not manifest.files:
        raise ArchiveError("EmptyWorkspace", "The manifest has no files.")
    if len(manifest.entries) > limits.entries:
        message = (
            f"The workspace has more than {limits.entries} files. Leave out files that the training"
            " does not need (.torchrunignore), or mount them from a PVC."
        )
        raise ArchiveError("WorkspaceTooLarge", message)
    refuse_size(manifest.size, limits)
    refuse_collisions([_place(entry, limits) for entry in manifest.entries])


def _place(entry: Entry, limits: ArchiveLimits) -> PlannedPath:
    path = components(entry.path, limits)
    if "/".join(path) != entry.path:
        raise refused("InvalidFile", entry.path, "ends in '/'")
    return PlannedPath(path, directory=entry.mode == "dir")
