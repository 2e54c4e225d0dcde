"""A client of the API server over HTTP, with the requests that the plugin makes."""

import asyncio  # for its timers
import html
import re
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from kubectl_torchrun.cluster.backoff import PATIENT, Retries
from kubectl_torchrun.cluster.http_client import (
    TIMEOUTS,
    TRANSPORT_ERRORS,
    CompleteResponse,
    HttpClient,
)
from kubectl_torchrun.cluster.slices import Listed, NamedSlice, Status, WatchEvent
from kubectl_torchrun.errors import why
from kubectl_torchrun.text import echo
from torchrun_api.json import JsonObject
from torchrun_api.kinds.kind import Kind, Object
from torchrun_api.names import SYNC_PORT

T = TypeVar("T", bound=Object)
V = TypeVar("V")

_UNAUTHORIZED = 401
_PAGE = re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE)
_TITLE = re.compile(rb"<title[^>]*>([^<]{1,200})", re.IGNORECASE)
_WATCH_SECONDS = 240
_WATCH_SILENCE = 120.0  # seconds; bookmarks arrive about every minute
_WATCH_OPEN = 5.0  # seconds; a watch without events that was open for so long has not failed
_BUSY_SECONDS = 20.0
SLOW_SECONDS = 5.0  # after which the user is told
# Seconds of silence. The response to the last range follows a digest of all bytes.
_POD_SECONDS = 60.0
_POD_BYTES = 16 << 20
_LONGEST_LINE = 1 << 20
_LONGEST_EVENT = 16 << 20  # an object of etcd has at most 1.5 MiB, in a shorter format than JSON


class RequestError(Exception):
    """The API server refused. `status` is the HTTP code; reason and message are of its Status."""

    def __init__(self, status: int, answer: Status) -> None:
        super().__init__(answer.message or f"HTTP {status}")
        self.status = status
        self.reason = answer.reason
        self.message = answer.message or f"the API server returned HTTP {status}"
        self.details = answer.details

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 429 or self.status >= 500

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait, from the Retry-After of the server."""
        return float(self.details.retry_after_seconds) or None


class Unreachable(Exception):  # noqa: N818 - named for the state, as in client libraries
    """The connection failed, or the response was lost: the request may still have succeeded."""


class Unreadable(Exception):  # noqa: N818 - as Unreachable
    """An object does not match the fields that this plugin reads; the message names both."""


class _Outage:
    """Tells the user once for each outage that the API server does not answer, or refuses.

    why: the last error; empty if there is no answer at all.
    """

    def __init__(self) -> None:
        self.why = ""
        self._has_noted = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note an answer that takes longer than SLOW_SECONDS."""
        timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self.note)
        try:
            yield
            self.ends()
        finally:
            timer.cancel()

    def note(self) -> None:
        """Print the reason for the wait, the first time."""
        if not self._has_noted:
            text = self.why or "The API server does not answer yet."
            echo(f"{text}\nStill trying. Press Ctrl-C to stop.", file=sys.stderr)
        self._has_noted = True

    def ends(self) -> None:
        """The API server has answered."""
        self.why, self._has_noted = "", False


class Api:
    """One namespace of a cluster. Create it with `connect`.

    Every method raises ApiError and Unreachable, and Unreadable if it returns an object. Reads wait
    while the server is busy. A request that the server answers with 401 is repeated once: kubectl
    replaces expired credentials only after such an answer.
    """

    def __init__(self, client: HttpClient, namespace: str, backoff: Retries) -> None:
        self.namespace = namespace
        self.backoff = backoff
        self._client = client
        self._outage = _Outage()

    async def get(self, kind: Kind[T], name: str) -> T:
        """One object."""
        return _object(await self._request("GET", kind.path(self.namespace, name)), kind)

    async def list(
        self, kind: Kind[T], query: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> Listed[T]:
        """All objects of the kind, or those that match the selectors of the query.

        `unreadable` lists the objects that cannot be read.
        """
        path = kind.path("" if everywhere else self.namespace)
        answer = await self._request("GET", path, query=query)
        try:
            return msgspec.json.decode(answer, type=Listed[kind.type])  # type: ignore[name-defined]
        except msgspec.DecodeError:
            return _one_by_one(_decode(answer, Listed[msgspec.Raw]), kind)

    async def read(self, path: str, query: Mapping[str, str] | None = None) -> JsonObject:
        """The response of a path of the API server, with all its fields."""
        return _decode(await self._request("GET", path, query=query), JsonObject)

    async def ask(self, path: str, body: JsonObject) -> JsonObject:
        """POST a review, which creates nothing; the response."""
        content = msgspec.json.encode(body)
        return _decode(await self._request("POST", path, content=content), JsonObject)

    async def create(self, kind: Kind[T], body: JsonObject, *, dry_run: bool = False) -> bytes:
        """Create the object, or only validate it. Returns the object as JSON."""
        query = {
            "fieldManager": "kubectl-torchrun",
            "fieldValidation": "Strict",
            **_dry(dry_run),
        }
        path = kind.path(self.namespace)
        return await self._request("POST", path, query=query, content=msgspec.json.encode(body))

    async def annotate(self, kind: Kind[T], name: str, annotations: Mapping[str, str]) -> None:
        """Set annotations in one patch."""
        body = {"metadata": {"annotations": annotations}}
        await self.merge(kind, name, msgspec.json.encode(body))

    async def merge(
        self, kind: Kind[T], name: str, body: bytes, *, dry_run: bool = False
    ) -> JsonObject:
        """Change an object with a JSON merge patch; returns the new object."""
        headers = {"Content-Type": "application/merge-patch+json"}
        query = {"fieldManager": "kubectl-torchrun", **_dry(dry_run)}
        path = kind.path(self.namespace, name)
        answer = await self._request("PATCH", path, query=query, content=body, headers=headers)
        return _decode(answer, JsonObject)

    async def delete(
        self, kind: Kind[T], name: str, *, grace: int | None = None, dry_run: bool = False
    ) -> None:
        """Delete the object; the garbage collector deletes what it owns. `grace`: seconds."""
        query = {"propagationPolicy": "Background", **_dry(dry_run)}
        if grace is not None:
            query["gracePeriodSeconds"] = str(grace)
        await self._request("DELETE", kind.path(self.namespace, name), query=query)

    async def watch(
        self,
        kind: Kind[T],
        query: Mapping[str, str],
        *,
        everywhere: bool = False,
        skips_unreadable: bool = False,
    ) -> AsyncIterator[dict[tuple[str, str], T]]:
        """The objects that match the selectors of the query: now, and after every change.

        By namespace and name. skips_unreadable: leave out what cannot be read. It survives lost
        connections and restarts of the API server, for `backoff.give_up` seconds. A watch that ends
        at once, as behind some gateways, is repeated with back-off.
        """
        failures, well_at, failed_at = 0, anyio.current_time(), 0.0  # 0: no failure
        while True:
            answers = 0  # the list and each event
            try:
                async for objects in self._list_and_watch(
                    kind, query, everywhere, skips_unreadable
                ):
                    answers, well_at, failed_at = answers + 1, anyio.current_time(), 0.0
                    self._outage.ends()
                    yield objects
            except (Unreachable, RequestError) as error:
                failed_at = failed_at or anyio.current_time()
                self._outage.why = str(error)
                if anyio.current_time() - failed_at > SLOW_SECONDS:
                    self._outage.note()
                retriable = isinstance(error, Unreachable) or error.retriable or error.status == 410
                if not retriable or anyio.current_time() - failed_at > self.backoff.give_up:
                    raise
            was_open = anyio.current_time() - well_at >= _WATCH_OPEN
            is_healthy = answers > 1 or (answers == 1 and was_open)
            failures = 1 if is_healthy else failures + 1
            await anyio.sleep(self.backoff.delay(failures))

    async def _list_and_watch(
        self, kind: Kind[T], query: Mapping[str, str], everywhere: bool, skips_unreadable: bool
    ) -> AsyncIterator[dict[tuple[str, str], T]]:
        listed = await self.list(kind, query, everywhere=everywhere)
        if listed.unreadable and not skips_unreadable:
            raise Unreadable(listed.unreadable[0])
        objects = {_key(item): item for item in listed.items}
        yield dict(objects)
        watching = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": listed.metadata.resource_version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        path = kind.path("" if everywhere else self.namespace)
        async with self._stream(
            path, watching, silence=_WATCH_SILENCE, longest=_LONGEST_EVENT
        ) as lines:
            async for line in lines:
                event = _decode(line, WatchEvent)
                if event.type == "BOOKMARK":
                    continue
                if event.type == "ERROR":
                    status = _decode(event.object, Status)
                    raise RequestError(status.code or 500, status)
                try:
                    item = _object(event.object, kind)
                except Unreadable:
                    if not skips_unreadable:
                        raise
                    continue
                if event.type == "DELETED":
                    objects.pop(_key(item), None)
                else:
                    objects[_key(item)] = item
                yield dict(objects)

    @asynccontextmanager
    async def log(
        self, pod: str, container: str, query: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a container's log, from `split_lines`."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        async with self._stream(path, {**query, "container": container}, silence=None) as lines:
            yield lines

    async def ask_pod(
        self,
        pod: str,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | Callable[[], AsyncIterator[bytes]] | None = None,
        namespace: str = "",
        port: int = SYNC_PORT,
    ) -> tuple[int, bytes]:
        """A request to a pod's port through the API server: status and body of the pod.

        The body is cut after 16 MiB, which no pod of ours sends.
        An error of the API server itself (pod deleted or unreachable, forbidden) is an ApiError.
        """
        where = namespace or self.namespace
        proxied = f"/api/v1/namespaces/{where}/pods/{pod}:{port}/proxy{path}"

        async def ask() -> tuple[int, bytes]:
            with _unreachable():
                response = await self._client.request(
                    method,
                    proxied,
                    headers=headers,
                    content=content() if callable(content) else content,
                    seconds=_POD_SECONDS,
                    most=_POD_BYTES,
                )
            if response.status >= 400:
                _raise_for_server(response.status, response.content)
            return response.status, response.content

        return await _with_new_credentials(ask)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of the response. A GET is retried while the server is busy."""
        failures = 0
        until = anyio.current_time() + _BUSY_SECONDS
        with self._outage.watched():
            while True:
                try:
                    return await _with_new_credentials(
                        lambda: self._try(method, path, query, content, headers)
                    )
                except RequestError as error:
                    if method != "GET" or not error.retriable or anyio.current_time() > until:
                        raise
                    failures += 1
                    self._outage.why = error.message
                    await anyio.sleep(error.retry_after or self.backoff.delay(failures))

    async def _try(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        content: bytes | None,
        headers: Mapping[str, str] | None,
    ) -> bytes:
        with _unreachable():
            response = await self._client.request(
                method,
                path,
                query=query,
                content=content,
                headers={"Content-Type": "application/json", **(headers or {})},
            )
        if response.status >= 400:
            _raise_for_server(response.status, response.content)
            raise _refusal(response)
        return response.content

    @asynccontextmanager
    async def _stream(
        self,
        path: str,
        query: Mapping[str, str],
        *,
        silence: float | None,
        longest: int = _LONGEST_LINE,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        with _unreachable():
            for is_last in (False, True):
                async with self._client.stream(path, query=query, silence=silence) as response:
                    if response.status == _UNAUTHORIZED and not is_last:
                        continue
                    if response.status >= 400:
                        refusal = await response.read()
                        _raise_for_server(refusal.status, refusal.content)
                        raise _refusal(refusal)
                    yield split_lines(response.chunks(), longest)
                    return


async def _with_new_credentials(send: Callable[[], Awaitable[V]]) -> V:
    try:
        return await send()
    except RequestError as error:
        if error.status != _UNAUTHORIZED:
            raise
    return await send()


@asynccontextmanager
async def connect(socket: Path, namespace: str, backoff: Retries = PATIENT) -> AsyncIterator[Api]:
    """A client to the API server behind `kubectl proxy` on this socket."""
    async with HttpClient(socket=socket) as client:
        yield Api(client, namespace, backoff)


async def split_lines(
    chunks: AsyncIterable[bytes], longest: int = _LONGEST_LINE
) -> AsyncIterator[bytes]:
    """Lines with their `\\n`; the last has none if the stream ends within it.

    A line of more bytes than `longest` is cut and ends with `\\n`.
    """
    rest, skipping = b"", False
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not skipping:
                yield line + b"\n"
            skipping = False
        if len(rest) > longest:
            if not skipping:
                yield rest[:longest] + b"\n"
            rest, skipping = b"", True
    if rest and not skipping:
        yield rest


class _unreachable:  # noqa: N801 - reads as a statement: with _unreachable()
    """Turns transport errors into Unreachable."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if isinstance(error, TIMEOUTS):
            raise Unreachable("Cannot connect to the API server: it does not answer.") from error
        if isinstance(error, TRANSPORT_ERRORS):
            raise Unreachable(f"Cannot connect to the API server: {why(error)}") from error


def describe_body(body: bytes) -> str:
    """The body of a response in a message: of a page only its title."""
    if _PAGE.match(body):
        title = _TITLE.search(body)
        text = " ".join(title[1].decode(errors="replace").split()) if title else ""
        return f"a web page ({html.unescape(text)})" if text else "a web page"
    return body.decode(errors="replace").strip()[:500]


def _refusal(response: CompleteResponse) -> RequestError:
    """The error for a response of a program that does not answer as the API server does.

    Raises Unreachable for a page of a proxy, such as that of a login.
    """
    text = describe_body(response.content)
    if _PAGE.match(response.content) and response.status < 500:
        raise Unreachable(f"The server of the cluster answered with {text}.")
    return RequestError(response.status, Status(message=text))


def _raise_for_server(status: int, body: bytes) -> None:
    """Raises the error of the API server or of kubectl; returns if the body is a pod's."""
    try:
        answer = msgspec.json.decode(body, type=Status)
    except msgspec.DecodeError:
        if status in (500, 502):  # an error of kubectl proxy, which did not reach the server
            text = describe_body(body) or f"HTTP {status}"
            raise Unreachable(f"Cannot connect to the API server: {text}") from None
        return
    if answer.kind == "Status":
        raise RequestError(status, answer)


def _key(item: Object) -> tuple[str, str]:
    return (item.metadata.namespace, item.metadata.name)


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}


def _object(body: bytes | msgspec.Raw, kind: Kind[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind.type)
    except msgspec.ValidationError as error:
        name = _decode(body, NamedSlice).metadata.name
        raise Unreadable(f"Cannot decode {kind.kind} {name}: {error}") from error
    except msgspec.DecodeError:
        return _decode(body, kind.type)  # which says so


def _one_by_one(listed: Listed[msgspec.Raw], kind: Kind[T]) -> Listed[T]:
    items: list[T] = []
    unreadable: list[str] = []
    for raw in listed.items:
        try:
            items.append(_object(raw, kind))
        except (Unreadable, Unreachable) as error:
            unreadable.append(str(error))
    return Listed(metadata=listed.metadata, items=tuple(items), unreadable=tuple(unreadable))


def _decode(body: bytes | msgspec.Raw, kind: type[V]) -> V:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        page = describe_body(bytes(body)) if _PAGE.match(bytes(body)) else ""
        if page:
            raise Unreachable(f"The server of the cluster answered with {page}.") from error
        raise Unreachable(f"Cannot decode the response of the API server: {error}") from error
