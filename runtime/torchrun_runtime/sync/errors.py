"""Errors of uploads, archives and sync pods. Messages are full sentences for the user."""

import errno

# Errors of a full file system or an exceeded quota (also on NFS).
FULL = (errno.ENOSPC, errno.EDQUOT)
# What to do about a full PVC: the controller does not resize the one that a job has.
LARGER_CLAIM = "Increase volumes.workspace.size in a new job"


class UploadError(Exception):
    """The request is answered with an error status.

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
    """The content of an archive is invalid. The message has the entry and the next step."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class SyncError(Exception):
    """Ends the pod. permanent: a new pod would fail in the same way."""

    def __init__(self, reason: str, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.permanent = permanent


def workspace_full(why: str) -> SyncError:
    """Return the error for a full PVC. Not permanent: another size or ref may fit."""
    message = f"The workspace PVC is full: {why}. {LARGER_CLAIM}."
    return SyncError("WorkspaceFull", message, permanent=False)
