"""AWS Signature Version 4.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html. A sync only reads, so
these lines replace an SDK of tens of megabytes.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

_EMPTY = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True)
class KeyPair:
    """A key pair for one region. session_token: "" unless the pair is temporary."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    region: str
    session_token: str = field(default="", repr=False)


def target(path: str, query: Mapping[str, str]) -> str:
    """The request target to sign and send. path: decoded, with a leading slash."""
    encoded = quote(path, safe="/-_.~")
    pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query.items())
    return encoded + ("?" if pairs else "") + "&".join(f"{k}={v}" for k, v in pairs)


def sign(
    credentials: KeyPair,
    method: str,
    host: str,
    signed_target: str,
    now: datetime,
    body_sha256: str = _EMPTY,
) -> dict[str, str]:
    """Headers to send with the request. host: as in the Host header; now: in UTC."""
    time = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": body_sha256, "x-amz-date": time}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    path, _, query = signed_target.partition("?")
    names = ";".join(sorted(headers))
    listed = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    request = "\n".join((method, path, query, listed, names, body_sha256))
    scope = f"{time[:8]}/{credentials.region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{credentials.secret_access_key}".encode()
    for part in (*scope.split("/"), "\n".join((_ALGORITHM, time, scope, digest))):
        key = hmac.digest(key, part.encode(), "sha256")
    headers["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key_id}/{scope},"
        f"SignedHeaders={names},Signature={key.hex()}"
    )
    return headers
