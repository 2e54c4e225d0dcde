"""Where the pod stands: what HTTP's threads ask and feed, and what the main thread waits for.

waiting -> receiving -> extracting -> done
   ^           |            |
   |  (digest wrong)        v
   +-----------+--------- failed    (a new upload starts again from failed)
"""

import threading
from typing import TYPE_CHECKING, Literal

from torchrun_runtime.sync.errors import UploadError
from torchrun_runtime.sync.upload import Identity, Upload

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject

State = Literal["waiting", "receiving", "extracting", "done", "failed"]


class Workflow:
    """The state, guarded by one lock. Uploads are begun here and fed through the upload itself."""

    def __init__(self, upload: Upload) -> None:
        self.upload = upload
        self.seen = threading.Event()
        self._changed = threading.Condition()
        self._stage: Literal["open", "extracting", "done", "failed"] = "open"
        self._accepted: Identity | None = None
        self._reason = self._message = ""
        if upload.complete:
            with self._changed:
                self._accept()

    def describe(self) -> "JsonObject":
        """State, digest, bytes held, and why the last upload was not taken."""
        with self._changed:
            identity = self._accepted or self.upload.identity
            body: JsonObject = {
                "state": self._state(),
                "sha256": identity.sha256 if identity else "",
                "offset": self.upload.offset,
            }
            if self._reason:
                body.update(reason=self._reason, message=self._message)
            return body

    @property
    def final(self) -> bool:
        """Whether the present state is one that a client waits for."""
        return self._stage in ("done", "failed")

    def begin(self, identity: Identity, start: int) -> object:
        """Open the upload to a writer. Raises UploadError, also 503 while another is extracted."""
        with self._changed:
            if self._stage in ("extracting", "done") and self._accepted:
                if identity == self._accepted:
                    message = "the archive is here already"
                    raise UploadError(409, "AlreadyReceived", message, offset=identity.total)
                message = f"the archive {self._accepted.sha256} is being extracted; try again later"
                raise UploadError(503, "Busy", message)
            writer = self.upload.begin(identity, start)
            self._stage = "open"
            self._accepted = None
            self._reason = self._message = ""
            self.seen.clear()  # what was seen is the end of an earlier upload
            return writer

    def finish(self, writer: object) -> bool:
        """Hand a complete archive to the main thread and say whether it is complete.

        Raises UploadError where the digest is wrong; the pod waits for another upload then.
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

    def wait_for_archive(self) -> Identity:
        """Block until an archive is complete. Bounded by the pod's activeDeadlineSeconds."""
        with self._changed:
            while self._stage != "extracting" or self._accepted is None:
                self._changed.wait()
            return self._accepted

    def refuse(self, reason: str, message: str) -> None:
        """The archive cannot become a workspace: drop it and take another."""
        with self._changed:
            self.upload.discard()
            self.fail(reason, message)

    def fail(self, reason: str, message: str) -> None:
        """Say why there is no workspace, and keep what was uploaded."""
        with self._changed:
            self._stage = "failed"
            self._reason, self._message = reason, message

    def succeed(self) -> None:
        """The workspace is there."""
        with self._changed:
            self._stage = "done"

    def _accept(self) -> None:
        self._accepted = self.upload.identity
        self._stage = "extracting"
        self._changed.notify_all()

    def _state(self) -> State:
        if self._stage != "open":
            return self._stage
        return "receiving" if self.upload.identity else "waiting"
