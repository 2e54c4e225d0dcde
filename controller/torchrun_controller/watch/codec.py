"""Decoding of watch frames and list pages into the slim types.

A frame is decoded in one pass, as a union tagged by its `type`: decoding type and object separately
takes 1.8 times as long (the frame of bench/torchrun_bench/frames.py, 2026-11-23, Python 3.11). A
frame that does not decode is decoded in parts: without its spec, then without its status.
"""

import re
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Raw, Struct, field

from torchrun_api.kinds.resources import Object
from torchrun_controller.watch.events import Deleted, Faulted, Key, Upserted
from torchrun_controller.watch.sharing import intern_strings, share_parts

T = TypeVar("T", bound=Object)

# Accept header of a list of metadata.
METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}

# msgspec raises these and no others; RecursionError for deep nesting.
UNREADABLE = (ValueError, RecursionError)

# https://kubernetes.io/docs/reference/using-api/api-concepts/#streaming-lists
_INITIAL_EVENTS_END = "k8s.io/initial-events-end"
# Seconds. A JSON number may exceed any float.
_MAX_RETRY_AFTER = 600
_NAME = re.compile(rb'"name":\s*"([^"\\]*)"')
_NAMESPACE = re.compile(rb'"namespace":\s*"([^"\\]*)"')


class Bookmark(NamedTuple):
    """A resourceVersion without an object; `initial_events_end` closes a streamed list."""

    resource_version: int
    initial_events_end: bool


class ServerError(NamedTuple):
    """The metav1.Status of an ERROR frame."""

    code: int
    reason: str
    message: str
    retry_after: float | None


class Page(NamedTuple, Generic[T]):
    """One page of a LIST; `next` is the token of the next page, "" after the last."""

    objects: list[T]
    faults: list[Faulted]
    resource_version: int
    next: str


class Versions(NamedTuple):
    """The newest resourceVersion of one page of a list, and the token of the next page."""

    newest: int
    next: str


class NotAList(Exception):  # noqa: N818 named for what the answer is
    """A 200 whose body is no Kubernetes list."""


class _Identity(Struct, frozen=True, rename="camel", gc=False):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    annotations: dict[str, str] = field(default_factory=dict)


class _Identified(Struct, frozen=True, gc=False):
    metadata: _Identity


class _Details(Struct, frozen=True, rename="camel"):
    retry_after_seconds: int = 0


class _Status(Struct, frozen=True):
    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details = _Details()


class _Added(Struct, Generic[T], frozen=True, tag_field="type", tag="ADDED", gc=False):
    object: T


class _Modified(Struct, Generic[T], frozen=True, tag_field="type", tag="MODIFIED", gc=False):
    object: T


class _Deleted(Struct, frozen=True, tag_field="type", tag="DELETED", gc=False):
    object: _Identified


class _Bookmark(Struct, frozen=True, tag_field="type", tag="BOOKMARK", gc=False):
    object: _Identified


class _Error(Struct, frozen=True, tag_field="type", tag="ERROR", gc=False):
    object: _Status


class _Frame(Struct, frozen=True):
    type: str
    object: Raw


class _ListMeta(Struct, frozen=True, rename="camel"):
    resource_version: str
    next: str = field(default="", name="continue")


class _List(Struct, Generic[T], frozen=True):
    metadata: _ListMeta
    items: list[T] | None = None


class _RawList(Struct, frozen=True):
    metadata: _ListMeta
    items: list[Raw] | None = None


class _MetadataList(Struct, frozen=True):
    metadata: _ListMeta
    items: list[_Identified] | None  # null where there are none


class _Pieces(Struct, frozen=True):
    metadata: Raw
    status: Raw = field(default_factory=lambda: Raw(b"{}"))


_FRAME = msgspec.json.Decoder(_Frame)
_IDENTIFIED = msgspec.json.Decoder(_Identified)
_RAW_LIST = msgspec.json.Decoder(_RawList)
_PIECES = msgspec.json.Decoder(_Pieces)
_METADATA_LIST = msgspec.json.Decoder(_MetadataList)


class Codec(Generic[T]):
    """Decodes frames and pages of one kind. Bad bytes give Faulted, a bad page NotAList."""

    def __init__(self, object_type: type[T]) -> None:
        frame = _Added[object_type] | _Modified[object_type] | _Deleted | _Bookmark | _Error  # type: ignore[valid-type]
        self._frame: msgspec.json.Decoder[
            _Added[T] | _Modified[T] | _Deleted | _Bookmark | _Error
        ] = msgspec.json.Decoder(frame)
        self._list: msgspec.json.Decoder[_List[T]] = msgspec.json.Decoder(_List[object_type])  # type: ignore[valid-type]
        self._object = msgspec.json.Decoder(object_type)
        # The types of users' kinds have a field `invalid`: why the spec could not be decoded.
        fields = msgspec.structs.fields(cast(type[Struct], object_type))
        names = {each.name: each.encode_name for each in fields}
        self._invalid = names.get("invalid", "")
        self._incomplete = names.get("incomplete", "")
        self._previous: T | None = None

    def frame(self, line: bytes) -> Upserted[T] | Deleted | Bookmark | ServerError | Faulted:
        """Decode one line of a watch."""
        try:
            frame = self._frame.decode(line)
            if isinstance(frame, _Added | _Modified):
                return self._build_upserted(frame.object)
            if isinstance(frame, _Error):
                return _server_error(frame.object)
            metadata = frame.object.metadata
            version = _version(metadata.resource_version)
            if isinstance(frame, _Deleted):
                return Deleted(_key(metadata), version)
            return Bookmark(version, metadata.annotations.get(_INITIAL_EVENTS_END) == "true")
        except UNREADABLE as error:
            return self._salvage_frame(line, error)

    def page(self, body: bytes) -> Page[T]:
        """Decode one page of a LIST. Raises NotAList."""
        try:
            page = self._list.decode(body)
            return _page(page.metadata, [self._share(obj) for obj in page.items or ()], [])
        except UNREADABLE:
            return self._salvage_page(body)

    def _build_upserted(self, obj: T) -> Upserted[T]:
        version = _version(obj.metadata.resource_version)
        return Upserted(self._share(obj), version)

    def _share(self, obj: T) -> T:
        """Store once what the object has in common with others."""
        self._previous = share_parts(intern_strings(obj), self._previous)
        return self._previous

    def _salvage_frame(self, line: bytes, error: Exception) -> Upserted[T] | Faulted:
        try:
            frame = _FRAME.decode(line)
            if frame.type not in ("ADDED", "MODIFIED"):
                return Faulted(identity_of(line), str(error))
            obj = self._salvage_object(frame.object)
            return obj if isinstance(obj, Faulted) else self._build_upserted(obj)
        except UNREADABLE as worse:
            return Faulted(identity_of(line), str(worse))

    def _salvage_page(self, body: bytes) -> Page[T]:
        try:
            page = _RAW_LIST.decode(body)
            results = [self._salvage_object(item) for item in page.items or ()]
            objects = [obj for obj in results if not isinstance(obj, Faulted)]
            faults = [fault for fault in results if isinstance(fault, Faulted)]
            return _page(page.metadata, [self._share(obj) for obj in objects], faults)
        except UNREADABLE as error:
            raise NotAList(str(error)) from error

    def _salvage_object(self, raw: Raw) -> T | Faulted:
        try:
            return self._object.decode(raw)
        except UNREADABLE as error:
            message = str(error)
        for without in ("spec", "status") if self._invalid else ():
            try:
                return self._object.decode(self._mark_invalid(raw, message, without))
            except UNREADABLE:
                continue
        return Faulted(identity_of(bytes(raw)), message)

    def _mark_invalid(self, raw: Raw, message: str, without: str) -> bytes:
        """Return the object as JSON without `without`, and with `message` as its `invalid` field.

        "spec" removes the spec only; "status" removes both, and sets the field `incomplete`.
        """
        pieces = _PIECES.decode(raw)
        fields: dict[str, object] = {"metadata": pieces.metadata, self._invalid: message}
        if without == "spec":
            fields["status"] = pieces.status
        else:
            fields[self._incomplete] = True
        return msgspec.json.encode(fields)


def read_versions(body: bytes) -> Versions:
    """Decode a page of metadata. Raises ValueError if it is no list or a version is no number."""
    page = _METADATA_LIST.decode(body)
    versions = (_version(item.metadata.resource_version) for item in page.items or ())
    return Versions(max(versions, default=0), page.metadata.next)


def identity_of(text: bytes) -> Key:
    """Return namespace and name from JSON that may be malformed, "" for what is not readable."""
    try:
        return _key(_IDENTIFIED.decode(text).metadata)
    except UNREADABLE:
        pass
    namespace, name = _NAMESPACE.search(text), _NAME.search(text)
    return (
        namespace[1].decode(errors="replace") if namespace else "",
        name[1].decode(errors="replace") if name else "",
    )


def _server_error(status: _Status) -> ServerError:
    seconds = float(max(0, min(status.details.retry_after_seconds, _MAX_RETRY_AFTER)))
    return ServerError(status.code, status.reason, status.message, seconds or None)


def _page(metadata: _ListMeta, objects: list[T], faults: list[Faulted]) -> Page[T]:
    return Page(objects, faults, _version(metadata.resource_version), metadata.next)


def _key(metadata: _Identity) -> Key:
    return metadata.namespace, metadata.name


def _version(text: str) -> int:
    # One resource's versions are comparable integers: KEP-5504, promised since Kubernetes 1.35.
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"metadata.resourceVersion {text!r} is not a number") from None
