"""Server-side apply of objects and status, and deletes with preconditions.

An object that must not exist yet is applied with a resourceVersion that no object can have. The API
server creates it if the name is free and answers 409 otherwise, so nothing foreign is ever merged.
A known object is applied by force with its UID; a replacement of it also answers 409. Every write
first checks the leadership.
"""

import secrets
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.queue import TorchrunQueueStatus
from torchrun_api.kinds.resources import SECRETS, Kind, UserObject, kind_of
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.client import ApiError, Disconnected, Requests, Response
from torchrun_controller.client.reads import METADATA_ONLY, NOT_ENDED, LiveReader
from torchrun_controller.client.responses import (
    Meta,
    describe_conflict,
    is_ours,
    is_predecessor,
    read_controller,
    read_deleted,
    read_holder,
    read_object,
)
from torchrun_controller.client.write_errors import (
    NameConflictError,
    RejectedError,
    SupersededError,
    UnavailableError,
    raise_if_unavailable,
)
from torchrun_controller.reconcile.model.observed import Rejection
from torchrun_controller.reconcile.model.plan import Apply, Delete

FIELD_MANAGER = "torchrun-controller"
STATUS_FIELD_MANAGER = "torchrun-controller-status"

Status: TypeAlias = TorchrunJobStatus | TorchrunQueueStatus

APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML
MERGE_PATCH = "application/merge-patch+json"

# etcd's first revision is the empty store, so no object has it.
ABSENT = "1"

# Start of the API server's message, with status 500, for an object whose fields have wrong types
# (from structured-merge-diff and the conversion after it; observed with 1.35).
MALFORMED = ("failed to create typed patch object", "failed to convert new object")


# The API server deletes the pods of a collection one after the other, at a few milliseconds each,
# and gives up after 60 s.
COLLECTION_SECONDS = 65.0


class LeaderCheck(Protocol):
    """Whether this process leads."""

    def check(self) -> None:
        """Raise NotLeader if no write may begin now."""


_encode = msgspec.json.Encoder().encode


class WriteResult(Struct, frozen=True):
    """The result of a write; `resource_version` is empty if the server did not return one.

    `created`: the object did not exist before.
    """

    kind: Kind[Any]
    name: str
    uid: str
    resource_version: str
    created: bool = False


class Applier(LiveReader):
    """Sends single writes. Has no state of its own. `new_key` returns a random text."""

    def __init__(
        self,
        transport: Requests,
        leader: LeaderCheck,
        new_key: Callable[[], str] = secrets.token_hex,
    ) -> None:
        super().__init__(transport)
        self._leader = leader
        self._new_key = new_key

    async def apply(self, intent: Apply) -> WriteResult:
        """Create the object (no UID), or update the one with this UID to the intent.

        If the name is taken by an object of this owner, that object is the result.

        Raises:
            NameConflictError: another object has the name; it was not touched.
            RejectedError: the API server refuses the object.
            SupersededError: the object is being deleted, or was replaced.
            UnavailableError: retry later.
            ApiError: any other refusal.
        """
        try:
            if intent.kind is SECRETS:
                return await self._create_secret(intent)
            return await (self._update(intent) if intent.uid else self._create(intent))
        except ApiError as error:
            _raise_converted(error, intent)
            raise
        except Disconnected as error:
            raise UnavailableError(str(error)) from error

    async def dry_run(self, intent: Apply) -> None:
        """Validate an object that does not exist on the API server, without creating it.

        Raises as `apply` does; NameConflictError if the name is taken.
        """
        body = {**intent.body, "metadata": {**_metadata(intent), "resourceVersion": ABSENT}}
        try:
            await self._patch(_path(intent), body, FIELD_MANAGER, dry_run=True)
        except ApiError as error:
            _raise_converted(error, intent)
            raise
        except Disconnected as error:
            raise UnavailableError(str(error)) from error

    async def apply_status(
        self, owner: UserObject, status: Status, manager: str = STATUS_FIELD_MANAGER
    ) -> WriteResult | None:
        """Replace the fields of `manager` in the status of exactly this version of a job or queue.

        Returns None if the object is gone. A UID alone is not enough: for a status the API server
        takes all metadata except the resourceVersion from the current object, so a replacement of
        the same name would get this status.

        Raises:
            SupersededError: it has changed, or was replaced, since it was observed.
            UnavailableError: retry later.
            ApiError: any other refusal.
        """
        kind, meta = kind_of(owner), owner.metadata
        body: JsonObject = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            "status": status,  # type: ignore[dict-item] # only encoded below
        }
        path = kind.path(meta.namespace, meta.name, "status")
        try:
            response = await self._patch(path, body, manager, force=True)
            return _write_result(kind, meta.name, response.read(read_object))
        except ApiError as error:
            if error.status == 404:
                return None
            if error.status == 409:
                raise SupersededError(f"{kind.kind} {meta.name!r} has changed meanwhile") from error
            if not (error.is_too_large or error.is_failed_webhook):
                raise_if_unavailable(error)
            raise
        except Disconnected as error:
            raise UnavailableError(str(error)) from error

    async def delete(self, delete: Delete) -> WriteResult | None:
        """Delete exactly this object; None if it is gone or replaced.

        Also None for the pods of a Job (`collection`).

        Raises:
            SupersededError: the object exists with another resourceVersion than expected.
            RejectedError: a webhook for the object does not answer.
            UnavailableError: retry later.
            ApiError: any other refusal.
        """
        preconditions = {"uid": delete.uid}
        if delete.resource_version:
            preconditions["resourceVersion"] = delete.resource_version
        options: JsonObject = {"propagationPolicy": delete.propagation}
        if not delete.collection:
            options["preconditions"] = {**preconditions}
        if delete.grace_seconds is not None:
            options["gracePeriodSeconds"] = delete.grace_seconds
        self._leader.check()
        try:
            if delete.collection:
                await self._delete_pods(delete, options)
                return None
            response = await self._transport.request(
                "DELETE",
                delete.kind.path(delete.namespace, delete.name),
                body=_encode(options),
            )
            return _write_result(delete.kind, delete.name, response.read(read_deleted))
        except ApiError as error:
            if error.status == 409 and delete.collection:
                # One of the pods has changed; those after it may not be deleted.
                raise UnavailableError(error.message) from error
            if error.status == 409:
                await self._explain_conflict(delete, error)
                return None
            if error.status == 404 or _is_uid_mismatch(error):
                return None
            if error.is_failed_webhook:
                resource = delete.kind.resource
                rejection = Rejection(resource, delete.name, error.message, verb="delete")
                raise RejectedError(rejection, permanent=False) from error
            raise_if_unavailable(error)
            raise
        except Disconnected as error:
            raise UnavailableError(str(error)) from error

    async def _delete_pods(self, delete: Delete, options: JsonObject) -> None:
        """Delete the pods of a Job that have not ended. The cache will show their deletion."""
        # The Job controller, too, decides by this label which pods belong to a Job: it adopts those
        # without a controller.
        await self._transport.request(
            "DELETE",
            delete.kind.path(delete.namespace),
            query={
                "labelSelector": f"{names.CONTROLLER_UID_LABEL}={delete.uid}",
                "fieldSelector": NOT_ENDED,
            },
            body=_encode(options),
            headers={"Accept": METADATA_ONLY},
            timeout=COLLECTION_SECONDS,
        )

    async def _explain_conflict(self, delete: Delete, error: ApiError) -> None:
        """Determine which precondition failed: the server answers 409 to both.

        Returns if the object is gone or replaced; raises SupersededError if it has changed.
        """
        live_object = await self.find(delete.kind, delete.namespace, delete.name)
        if live_object is not None and live_object.uid == delete.uid:
            message = f"{delete.kind.kind} {delete.name!r} has changed meanwhile"
            raise SupersededError(message) from error

    async def _create(self, intent: Apply) -> WriteResult:
        meta = _metadata(intent)
        body = {**intent.body, "metadata": {**meta, "resourceVersion": ABSENT}}
        try:
            response = await self._patch(_path(intent), body, FIELD_MANAGER)
        except ApiError as error:
            if error.status != 409:
                raise
            return await self._resolve_taken_name(intent)
        result = _write_result(intent.kind, intent.name, response.read(read_object))
        return replace(result, created=True)

    async def _create_secret(self, intent: Apply) -> WriteResult:
        """Create a Secret with a random key, unless it exists.

        A POST, because the controller may create Secrets, but neither read nor change them.
        """
        body = {**intent.body, "stringData": {names.GANG_KEY: self._new_key()}}
        path = intent.kind.path(str(_metadata(intent)["namespace"]))
        query = {"fieldManager": FIELD_MANAGER}
        self._leader.check()
        try:
            response = await self._transport.request("POST", path, query=query, body=_encode(body))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            return WriteResult(intent.kind, intent.name, "", "")
        result = _write_result(intent.kind, intent.name, response.read(read_object))
        return replace(result, created=True)

    async def _update(self, intent: Apply) -> WriteResult:
        meta = _metadata(intent)
        body = {**intent.body, "metadata": {**meta, "uid": intent.uid}}
        if intent.merge:
            response = await self._patch(
                _path(intent), body, FIELD_MANAGER, content_type=MERGE_PATCH
            )
        else:
            response = await self._patch(_path(intent), body, FIELD_MANAGER, force=True)
        return _write_result(intent.kind, intent.name, response.read(read_object))

    async def _patch(
        self,
        path: str,
        body: JsonObject,
        manager: str,
        *,
        content_type: str = APPLY_PATCH,
        force: bool = False,
        dry_run: bool = False,
    ) -> Response:
        query = {"fieldManager": manager}
        if force:
            query["force"] = "true"
        if dry_run:
            query["dryRun"] = "All"
        self._leader.check()
        return await self._transport.request(
            "PATCH", path, query=query, body=_encode(body), content_type=content_type
        )

    async def _resolve_taken_name(self, intent: Apply) -> WriteResult:
        """Handle a taken name: an object of ours counts as created, another one raises."""
        meta = _metadata(intent)
        name = intent.name
        try:
            response = await self._transport.request("GET", _path(intent))
        except ApiError as error:
            if error.status == 404:
                raise SupersededError(
                    f"{intent.kind.kind} {name!r} was deleted meanwhile"
                ) from error
            raise
        holder = response.read(read_holder)
        owner = read_controller(meta.get("ownerReferences"))
        if holder.deletion_timestamp is not None or is_predecessor(holder, owner):
            raise SupersededError(f"an older {intent.kind.kind} {name!r} is being deleted")
        if not is_ours(holder, owner, meta):
            raise NameConflictError(describe_conflict(intent.kind, name, holder))
        return WriteResult(intent.kind, name, holder.uid, holder.resource_version)


def _metadata(intent: Apply) -> JsonObject:
    meta = intent.body["metadata"]
    assert isinstance(meta, dict)
    return meta


def _path(intent: Apply) -> str:
    return intent.kind.path(str(_metadata(intent).get("namespace", "")), intent.name)


def _write_result(kind: Kind[Any], name: str, meta: Meta) -> WriteResult:
    return WriteResult(kind, name, meta.uid, meta.resource_version)


def _is_uid_mismatch(error: ApiError) -> bool:
    """Whether the object on the server has another UID than the request."""
    # 422 with this cause for a replacement, 409 for a missing object or a failed precondition.
    return error.status == 409 or any(field == "metadata.uid" for field, _ in error.causes)


def _raise_converted(error: ApiError, intent: Apply) -> None:
    """Raise the error of this module for a refused intent, if there is one for it."""
    kind, name = intent.kind, intent.name
    if _is_uid_mismatch(error):
        message = f"{kind.kind} {name!r} was deleted or replaced meanwhile"
        raise SupersededError(message) from error
    malformed = error.status == 500 and error.message.startswith(MALFORMED)
    is_permanent = malformed or error.is_permanent
    if is_permanent or error.is_failed_webhook or error.status == 403:
        rejection = Rejection(kind.resource, name, error.message)
        raise RejectedError(rejection, permanent=is_permanent) from error
    raise_if_unavailable(error)
