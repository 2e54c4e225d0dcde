"""Why an upload is not taken, and why the pod ends without a workspace."""


class UploadError(Exception):
    """A request that is answered with a status other than success.

    status: HTTP status code; reason: CamelCase; offset: received bytes, where the client continues.
    """

    def __init__(
        self, status: int, reason: str, message: str, *, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.offset = offset


class ArchiveError(Exception):
    """The archive's content is not acceptable; message names the member and says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class SyncError(Exception):
    """Ends the pod. permanent: the same pod started again would fail the same way."""

    def __init__(self, reason: str, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.permanent = permanent
