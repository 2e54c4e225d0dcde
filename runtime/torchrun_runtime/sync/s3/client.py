"""A client of one bucket: lists and reads objects, with retries.

Requests have the bucket in the path, which every gateway supports. Connections go only to the
addresses that `address.resolve` allowed: each address has a separate pool, urllib3 uses the host
name only for TLS, and does not follow redirects.
"""

import hashlib
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import unquote_to_bytes
from xml.etree import ElementTree

from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPSConnectionPool, Timeout
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from torchrun_runtime.sync.address import Location
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.paths import display_name, refused
from torchrun_runtime.sync.report import log
from torchrun_runtime.sync.s3.signature import KeyPair, sign, target

_PIECE = 1 << 20
_LONGEST_PAGE = 16 << 20  # bytes; 1,000 keys of 1,024 bytes, each percent-encoded
_LONGEST_ERROR = 1 << 16
_CONNECT_SECONDS = 20.0
_SILENCE_SECONDS = 60.0
_CONNECTIONS = 8  # open connections, one for each thread that reads
_ATTEMPTS = 5
PAUSE = 0.5  # seconds before the first retry; doubled for each further retry
_PASSING = (429, 500, 502, 503, 504)
_MD5 = re.compile(r"[0-9a-f]{32}")
_ETAG = re.compile(r"[ -~]{0,1024}")  # valid in a header
_LONGEST = 300
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>")


@dataclass(frozen=True)
class BucketObject:
    """One object: size in bytes; etag without its quotes."""

    key: str
    size: int
    etag: str


@dataclass(frozen=True)
class BucketEndpoint:
    """Where a bucket is. deadline: by time.monotonic(). scrub: removes secrets from messages."""

    location: Location
    addresses: tuple[str, ...]
    bucket: str
    credentials: KeyPair | None
    tls: ssl.SSLContext | None
    deadline: float
    scrub: Callable[[str], str] = str

    @property
    def host(self) -> str:
        """The value of the Host header."""
        host = self.location.host
        host = f"[{host}]" if ":" in host else host
        default = self.location.port == (443 if self.tls else 80)
        return host if default else f"{host}:{self.location.port}"

    @property
    def display_name(self) -> str:
        """The name for messages."""
        return f"{self.location.scheme}://{self.host}/{self.bucket}"


T = TypeVar("T")


class _RetryableError(Exception):
    """The connection broke, or the server is busy; the request may be sent again."""


class Bucket:
    """Lists and reads the objects of one bucket. Every method may be called from any thread."""

    def __init__(self, endpoint: BucketEndpoint) -> None:
        self.endpoint = endpoint
        self._pools = [_pool(endpoint, address) for address in endpoint.addresses]

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            pool.close()

    def list(self, prefix: str) -> Iterator[BucketObject]:
        """Objects by key, page by page. Raises SyncError."""
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        while True:
            page = self._retried(lambda: self._page(dict(query)), prefix)
            yield from _objects(page, self.endpoint.display_name)
            token = page.findtext("NextContinuationToken") or ""
            if page.findtext("IsTruncated") != "true":
                return
            if not token or token == query.get("continuation-token"):
                message = (
                    f"Bucket {self.endpoint.display_name} returns the same page of objects twice."
                )
                raise SyncError("FetchFailed", message, permanent=False)
            query["continuation-token"] = token

    def find(self, key: str) -> BucketObject:
        """One object by its key. Raises SyncError."""

        def ask() -> BucketObject:
            # With GET, whose body is not read: the response to a HEAD does not describe errors.
            response = self._get(key, {}, {})
            response.close()
            size = response.headers.get("Content-Length", "")
            if not size.isdecimal():
                raise SyncError("FetchFailed", f"Object {key!r} has no size.", permanent=False)
            return BucketObject(key, int(size), _etag(response.headers.get("ETag"), key))

        return self._retried(ask, key)

    def pieces(self, source: BucketObject) -> Iterator[bytes]:
        """The content; continues after a lost connection. Raises SyncError.

        Each response must have the ETag of the object. If it is an MD5, the content is checked.
        """
        offset, digest, failures = 0, hashlib.md5(usedforsecurity=False), 0
        checked = True
        while True:
            try:
                response, skip = self._open(source, offset)
                checked = response.headers.get("x-amz-server-side-encryption", "") in ("", "AES256")
                with response:  # closes the connection unless the body is read to its end
                    while offset < source.size and (piece := self._read(response)):
                        fresh, skip = piece[skip:], max(0, skip - len(piece))
                        fresh = fresh[: source.size - offset]
                        offset += len(fresh)
                        digest.update(fresh)
                        failures = 0
                        yield fresh
                    if offset < source.size:
                        raise _RetryableError("it ended too early")
                break
            except _RetryableError as error:
                failures += 1
                self._pause(failures, source.key, error)
        if checked and _MD5.fullmatch(source.etag) and digest.hexdigest() != source.etag:
            message = (
                f"Object {source.key!r} of {self.endpoint.display_name} was damaged during the"
                " download (its MD5 is not its ETag)."
            )
            raise SyncError("FetchFailed", message, permanent=False)

    def _open(self, source: BucketObject, offset: int) -> tuple[BaseHTTPResponse, int]:
        """The content from `offset` on, and the number of its bytes to skip."""
        headers = {"if-match": f'"{source.etag}"'} if source.etag else {}
        if offset:
            headers["range"] = f"bytes={offset}-"
        response = self._get(source.key, {}, headers)
        etag = response.headers.get("ETag", "").strip('"')
        if etag != source.etag:
            response.close()
            raise changed(source.key, self.endpoint.display_name)
        return response, offset if response.status == 200 else 0

    def _read(self, response: BaseHTTPResponse) -> bytes:
        self._check_time()
        try:
            return response.read(_PIECE)
        except (HTTPError, OSError) as error:
            raise _RetryableError(str(error)) from error

    def _page(self, query: Mapping[str, str]) -> ElementTree.Element:
        body = b""
        with self._get("", query, {}) as response:
            while len(body) <= _LONGEST_PAGE and (piece := self._read(response)):
                body += piece
        if len(body) > _LONGEST_PAGE or b"<!DOCTYPE" in body or b"\0" in body:
            message = f"Bucket {self.endpoint.display_name} does not return a list of objects."
            raise SyncError("FetchFailed", message, permanent=False)
        try:
            root = ElementTree.fromstring(body)  # noqa: S314  # no DOCTYPE, so no entities
        except (ElementTree.ParseError, ValueError, LookupError) as error:  # also of its encoding
            raise _RetryableError(f"its list cannot be read: {error}") from error
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root

    def _get(
        self, key: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> BaseHTTPResponse:
        """A response of 200 or 206 with unread body. Raises SyncError, _RetryableError."""
        endpoint = self.endpoint
        self._check_time()
        path = f"/{endpoint.bucket}/{key}" if key else f"/{endpoint.bucket}"
        where = target(path, query)
        own = {"host": endpoint.host}
        if endpoint.credentials:
            own = sign(endpoint.credentials, "GET", endpoint.host, where, datetime.now(UTC))
        try:
            response = self._send(where, {**own, **headers})
            if response.status in (200, 206):
                return response
            with response:
                body = endpoint.scrub(response.read(_LONGEST_ERROR).decode(errors="replace"))
        except SSLError as error:
            reason = error.args[0] if error.args else error
            if not isinstance(reason, ssl.SSLCertVerificationError):
                raise _RetryableError(str(error)) from error
            message = (
                f"The certificate of {endpoint.display_name} is not trusted"
                f" ({reason.verify_message}). Add its certificate authority as ca.crt to the"
                " Secret."
            )
            raise SyncError("CertificateInvalid", message, permanent=False) from error
        except (HTTPError, OSError) as error:
            raise _RetryableError(str(error) or type(error).__name__) from error
        if response.status in _PASSING:
            raise _RetryableError(f"status {response.status}")
        response_headers = {name.lower(): value for name, value in response.headers.items()}
        raise explain(response.status, response_headers, body, key, endpoint.display_name)

    def _send(self, where: str, headers: Mapping[str, str]) -> BaseHTTPResponse:
        """Send to the first address that accepts a connection. Raises urllib3's HTTPError."""
        for pool in self._pools[:-1]:
            try:
                return _urlopen(pool, where, headers)
            except (NewConnectionError, ConnectTimeoutError):
                continue
        return _urlopen(self._pools[-1], where, headers)

    def _retried(self, ask: Callable[[], T], key: str) -> T:
        failures = 0
        while True:
            try:
                return ask()
            except _RetryableError as error:
                failures += 1
                self._pause(failures, key, error)

    def _pause(self, failures: int, key: str, error: _RetryableError) -> None:
        if failures >= _ATTEMPTS:
            message = (
                f"Cannot read {self.endpoint.display_name} ({error}, {failures} times in a row)."
            )
            raise SyncError("FetchFailed", message, permanent=False) from error
        log("retrying", "warning", key=key, error=str(error))
        time.sleep(PAUSE * 2 ** (failures - 1))
        self._check_time()

    def _check_time(self) -> None:
        if time.monotonic() > self.endpoint.deadline:
            name = self.endpoint.display_name
            message = f"Reading {name} timed out. Check whether it is slow or too large."
            raise SyncError("FetchFailed", message, permanent=False)


def _pool(endpoint: BucketEndpoint, address: str) -> HTTPConnectionPool:
    timeout = Timeout(connect=_CONNECT_SECONDS, read=_SILENCE_SECONDS)
    port = endpoint.location.port
    if endpoint.tls is None:
        return HTTPConnectionPool(address, port, timeout=timeout, maxsize=_CONNECTIONS)
    return HTTPSConnectionPool(
        address,
        port,
        timeout=timeout,
        maxsize=_CONNECTIONS,
        ssl_context=endpoint.tls,
        server_hostname=endpoint.location.host,
    )


def _urlopen(pool: HTTPConnectionPool, where: str, headers: Mapping[str, str]) -> BaseHTTPResponse:
    return pool.urlopen(
        "GET",
        where,
        headers=headers,
        retries=False,
        redirect=False,
        preload_content=False,
        decode_content=False,
    )


def _objects(page: ElementTree.Element, bucket: str) -> Iterator[BucketObject]:
    is_encoded = page.findtext("EncodingType") == "url"  # some gateways ignore encoding-type
    for element in page.iter("Contents"):
        key, size = element.findtext("Key") or "", element.findtext("Size") or ""
        try:
            # Of a form: AWS and MinIO send a space as "+". A "+" of the key is "%2B".
            decoded = unquote_to_bytes(key.replace("+", " ")).decode() if is_encoded else key
        except UnicodeDecodeError:
            raise refused("InvalidFile", key, "has a name that is not UTF-8") from None
        if not decoded or not size.isascii() or not size.isdecimal():
            message = f"Bucket {bucket} lists an object without key or size."
            raise SyncError("FetchFailed", message, permanent=False)
        yield BucketObject(decoded, int(size), _etag(element.findtext("ETag"), decoded))


def _etag(text: str | None, key: str) -> str:
    """An ETag without its quotes. Raises SyncError if a request cannot contain it."""
    etag = (text or "").strip('"')
    if not _ETAG.fullmatch(etag):
        message = (
            f"The ETag {display_name(etag)} of object {display_name(key)} is not printable"
            " ASCII. Check the gateway, or upload the object again."
        )
        raise SyncError("FetchFailed", message, permanent=False)
    return etag


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
            "The clocks of the sync pod's machine and the gateway differ by more than the gateway"
            " allows (15 minutes). Synchronize the machine's clock with NTP."
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
