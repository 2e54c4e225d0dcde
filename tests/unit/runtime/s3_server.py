"""An S3 gateway with injected faults. Integration tests use a real gateway."""

import hashlib
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, quote_plus, unquote, urlsplit
from xml.sax.saxutils import escape

from unit.runtime.http_server import listening


@dataclass
class Request:
    """One request. key: "" for the bucket itself."""

    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass
class Reply:
    """cut: bytes of the body after which the connection breaks."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


Answer = Callable[[Request], Reply]
Encode = Callable[[str], str]

# How AWS and MinIO encode keys with encoding-type=url (s3URLEncode of MinIO): a space is "+".
form_encoded: Encode = partial(quote_plus, safe="/*")


def etag(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def listing(
    objects: dict[str, bytes],
    token: str = "",
    encode: Encode | None = form_encoded,
    **changes: str,
) -> bytes:
    """A page of ListObjectsV2. encode: None for a gateway that ignores encoding-type; changes:
    other texts for Size and ETag.
    """
    contents = "".join(
        f"<Contents><Key>{escape(encode(key) if encode else key)}</Key>"
        f"<Size>{changes.get('size', len(content))}</Size>"
        f"<ETag>&quot;{changes.get('etag', etag(content))}&quot;</ETag></Contents>"
        for key, content in objects.items()
    )
    encoding = "<EncodingType>url</EncodingType>" if encode else ""
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{encoding}{more}{contents}"
        "</ListBucketResult>"
    ).encode()


def content(objects: dict[str, bytes], request: Request) -> Reply:
    """The response of a healthy gateway with these objects."""
    body = objects[request.key]
    headers = {"ETag": f'"{etag(body)}"'}
    start = request.headers.get("range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
    if int(start):
        return Reply(body[int(start) :], 206, headers)
    return Reply(body, 200, headers)


def behave(objects: dict[str, bytes], encode: Encode | None = form_encoded) -> Answer:
    """A handler that lists and returns these objects."""

    def answer(request: Request) -> Reply:
        if not request.key:
            prefix = request.query["prefix"]
            found = {k: v for k, v in objects.items() if k.startswith(prefix)}
            return Reply(listing(found, encode=encode))
        return content(objects, request)

    return answer


@dataclass
class Gateway:
    """A running gateway: its port and its requests."""

    answer: Answer
    port: int = 0
    requests: list[Request] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


@contextmanager
def serving(
    address: tuple[str, int] = ("127.0.0.1", 0), tls: ssl.SSLContext | None = None
) -> Iterator[Gateway]:
    """Handle requests with `answer`, which tests can replace."""
    state = Gateway(behave({}))

    def answer(handler: BaseHTTPRequestHandler) -> None:
        request = _read(handler)
        state.requests.append(request)
        reply = state.answer(request)
        handler.send_response_only(reply.status)
        for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(reply.body[: reply.cut])
        if reply.cut is not None:
            handler.close_connection = True

    with listening(address, answer, version="HTTP/1.1", tls=tls) as state.port:
        yield state


def _read(handler: BaseHTTPRequestHandler) -> Request:
    parts = urlsplit(handler.path)
    bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
    query = {
        name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()
    }
    headers = {name.lower(): value for name, value in handler.headers.items()}
    return Request(bucket, key, query, headers)
