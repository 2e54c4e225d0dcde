"""The state of an upload, shared by the HTTP server and the main thread.

waiting -> [comparing ->] receiving -> extracting -> done
   ^            |             |            |
   |            +--- (nothing is missing) -+
   +--- failed <--------------+------------+     (a new upload starts again from failed)

With a manifest, a client sends only the contents that the pod lists as missing.

While the pod compares or extracts, it reports as `progress` a number that changes with each file
and each MiB that it reads or writes. A client may give up a pod whose number stands still.
"""

import threading
from typing import TYPE_CHECKING, Literal

from torchrun_runtime.sync.errors import UploadError
from torchrun_runtime.sync.pending_manifest import PendingManifest
from torchrun_runtime.sync.upload import Identity, ReceivedUpload

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject, JsonValue

State = Literal["waiting", "comparing", "receiving", "extracting", "done", "failed"]


class Workflow:
    """The state, protected by a lock. `begin` opens an upload; its bytes go to `Upload.append`.

    result_read: set when a client has read the final state.
    """

    def __init__(self, upload: ReceivedUpload, pending: PendingManifest) -> None:
        self.upload = upload
        self.pending = pending
        self.result_read = threading.Event()
        self._changed = threading.Condition()
        self._stage: Literal["open", "comparing", "extracting", "done", "failed"] = "open"
        self._accepted: Identity | None = None
        self._missing: list[list[int]] = []
        self._revision = 0
        self._progress = 0
        self._reason = self._message = ""
        if pending.manifest is not None:
            self._stage = "comparing"
        elif upload.complete:
            self._accept()

    def describe(self) -> "JsonObject":
        """State, digests, received bytes, missing entries, progress, error of the last upload."""
        with self._changed:
            identity = self._accepted or self.upload.identity
            missing: list[JsonValue] = [[first, last] for first, last in self._missing]
            body: JsonObject = {
                "state": self._state(),
                "sha256": identity.sha256 if identity else "",
                "offset": self.upload.offset,
                "workspace": self.pending.sha256,
                "missing": missing,
                "base": self.pending.base,
                "revision": self._revision,
            }
            if self._stage in ("comparing", "extracting"):
                body["progress"] = self._progress
            if self._reason:
                body.update(reason=self._reason, message=self._message)
            return body

    @property
    def final(self) -> bool:
        """Whether the current state is final for a client."""
        return self._stage in ("done", "failed")

    def announce(self, sha256: str, data: bytes) -> None:
        """Accept a manifest, and let the main thread find its missing contents.

        Raises UploadError as `PendingManifest.take`, and 503 while another workspace is written.
        """
        with self._changed:
            if self._stage in ("comparing", "extracting", "done"):
                if self.pending.sha256 == sha256:
                    return
                raise _busy()
            self.pending.take(sha256, data)
            current = self.upload.identity
            if current and current.workspace != sha256:
                self.upload.discard()
            self._missing = []
            self._reason = self._message = ""
            self._to("comparing")
            self.result_read.clear()  # it was the result of an earlier upload

    def begin(self, identity: Identity, start: int) -> object:
        """Open the upload for a writer.

        Raises UploadError, also 503 while another archive is extracted, and 409 if the manifest of
        the archive is missing.
        """
        with self._changed:
            if self._stage in ("extracting", "done") and self._accepted:
                if identity == self._accepted:
                    message = "The pod already has the archive."
                    raise UploadError(409, "AlreadyReceived", message, offset=identity.total)
                raise _busy()
            if self._stage == "comparing":
                raise _busy()
            if identity.workspace != self.pending.sha256:
                if identity.workspace:
                    message = "Send the manifest of the archive first."
                    raise UploadError(409, "ManifestNeeded", message)
                self.pending.discard()
                self._missing = []
            writer = self.upload.begin(identity, start)
            self._stage = "open"
            self._accepted = None
            self._reason = self._message = ""
            self.result_read.clear()
            return writer

    def finish(self, writer: object) -> bool:
        """Pass a complete archive to the main thread. Returns whether it is complete.

        Raises UploadError if the digest is wrong. The pod then waits for another upload.
        """
        with self._changed:
            try:
                complete = self.upload.finish(writer)
            except UploadError as error:
                if error.status == 422:
                    self._reason, self._message = error.reason, error.message
                raise
            if complete:
                self._accept()
            return complete

    def wait(self) -> None:
        """Block until a manifest or a complete archive is received.

        Bounded by the pod's activeDeadlineSeconds.
        """
        with self._changed:
            while self._stage not in ("comparing", "extracting"):
                self._changed.wait()

    def advance(self) -> None:
        """Count a step of the comparison or the extraction. Called from any thread."""
        with self._changed:
            self._progress += 1

    def ask_for(self, missing: list[list[int]]) -> None:
        """Request missing contents from the client: ranges of entries of the manifest."""
        with self._changed:
            self._missing = missing
            self._accepted = None
            self._stage = "open"

    def refuse(self, reason: str, message: str) -> None:
        """Discard an invalid archive and wait for another one."""
        with self._changed:
            self.upload.discard()
            self.fail(reason, message)

    def fail(self, reason: str, message: str) -> None:
        """Report the error, and keep the upload."""
        with self._changed:
            self._stage = "failed"
            self._reason, self._message = reason, message

    def succeed(self, revision: int) -> None:
        """Report that the workspace is complete."""
        with self._changed:
            self._revision = revision
            self._missing = []
            self._stage = "done"

    def _accept(self) -> None:
        self._accepted = self.upload.identity
        self._to("extracting")

    def _to(self, stage: Literal["comparing", "extracting"]) -> None:
        with self._changed:
            self._stage = stage
            self._changed.notify_all()

    def _state(self) -> State:
        if self._stage != "open":
            return self._stage
        return "receiving" if self.upload.identity else "waiting"


def _busy() -> UploadError:
    return UploadError(503, "Busy", "The pod is busy with another workspace. Retry later.")
