"""Authorization of uploads: the client must know a secret of the job.

Any pod of the cluster can reach the sync pod's port. The controller copies annotations of the job,
which only users who may edit the job can set:

- The SHA-256 of a token. A client that sends the token may upload any workspace.
- The SHA-256 of the only accepted workspace. A client that sends it may upload that one. It is in
  no response and no log line, so only users who may read the job or have the files know it.

Without either annotation no upload is accepted.
"""

import hashlib
import hmac
from dataclasses import dataclass

from torchrun_runtime.sync.errors import UploadError

TOKEN_HEADER = "X-Torchrun-Upload-Token"  # noqa: S105  # the name of a header

_HOW = (
    "Run: kubectl torchrun sync JOB, or first: kubectl annotate tj JOB"
    " torchrun.ai/workspace-sha256=SHA256 --overwrite"
)


@dataclass(frozen=True)
class Authorization:
    """token_sha256: of the upload token. required_digest: of the workspace. "" for none."""

    token_sha256: str
    required_digest: str

    def check(self, token: str, *digests: str) -> None:
        """Raises UploadError (403) without the right token or the required digest."""
        token_sha256 = hashlib.sha256(token.encode(errors="replace")).hexdigest()
        if token and self.token_sha256 and hmac.compare_digest(token_sha256, self.token_sha256):
            return
        required = self.required_digest.encode()
        # As bytes: compare_digest refuses text that is not ASCII.
        shown = [digest.encode(errors="replace") for digest in digests]
        if required and any(hmac.compare_digest(digest, required) for digest in shown):
            return
        if not (self.token_sha256 or required):
            message = (
                f"The job has no annotation with a workspace digest or an upload token. {_HOW}"
            )
            raise UploadError(403, "UploadDenied", message)
        message = (
            "The request has neither the upload token nor the SHA-256 of the job's annotations."
            f" {_HOW}"
        )
        raise UploadError(403, "UploadDenied", message)
