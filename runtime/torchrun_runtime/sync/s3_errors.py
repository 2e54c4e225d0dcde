"""From a gateway's error response to a reason and a message with the next step."""

import re
from collections.abc import Mapping

from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.paths import display_name

_LONGEST = 300
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>")


def explain(status: int, headers: Mapping[str, str], body: str, key: str, bucket: str) -> SyncError:
    """The error of a status. body: XML of the gateway, or empty; bucket: name for messages."""
    code, message = _field(body, "Code"), _field(body, "Message")
    answer = (
        f"status {status}" + (f", {code}" if code else "") + (f": {message}" if message else "")
    )
    where = f"{display_name(key)} of {bucket}" if key else bucket
    region = headers.get("x-amz-bucket-region", "") or "".join(_REGION.findall(body)[:1])
    if region and status in (301, 307, 400):
        hint = f"It is in region {display_name(region)}. Set AWS_REGION in the Secret."
        return SyncError("WrongRegion", f"Cannot read {where}. {hint} ({answer})", permanent=False)
    if 300 <= status < 400:
        hint = "Redirects are not followed. Set the current endpoint of the bucket."
        return SyncError("Redirected", f"Cannot read {where}. {hint} ({answer})", permanent=True)
    if status == 412:
        return changed(key, bucket)
    reason, hint = _by_status(status, code, message)
    return SyncError(reason, f"Cannot read {where}. {hint} ({answer})", permanent=False)


def _by_status(status: int, code: str, message: str) -> tuple[str, str]:
    if code == "RequestTimeTooSkewed":
        return "ClockSkew", (
            "The clocks of the sync pod's node and the gateway differ by more than the gateway"
            " allows (15 minutes). Synchronize the node's clock with NTP."
        )
    # Some gateways answer another status than 403 for an unknown key.
    if status in (401, 403) or "AccessKey" in code or "access key" in message.lower():
        return "AccessDenied", (
            "Check the keys of the Secret in volumes.workspace.secretRef and their permissions"
            " (s3:ListBucket, s3:GetObject)."
        )
    if code == "NoSuchBucket":
        return "SourceNotFound", "The bucket does not exist."
    if status == 404:
        return "SourceNotFound", "The object does not exist. Check volumes.workspace.url."
    return "FetchFailed", "The gateway rejected the request."


def changed(key: str, bucket: str) -> SyncError:
    """The error for an object that changed during the read."""
    message = f"Object {display_name(key)} of {bucket} changed during the download. Retrying."
    return SyncError("SourceChanged", message, permanent=False)


def _field(body: str, name: str) -> str:
    match = re.search(rf"<{name}>([^<]*)</{name}>", body)
    text = match[1][:_LONGEST] if match else ""
    return "".join(c if c.isprintable() else " " for c in text)
