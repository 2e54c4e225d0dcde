"""The output of reconcile: data that can be printed and compared."""

from typing import Any, Literal

from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds import Kind
from torchrun_api.meta import ChildMeta, ObjectMeta
from torchrun_api.status import TorchrunJobStatus


class Apply(Struct, frozen=True):
    """Server-side apply of one object. Without a UID the object must not exist yet.

    With `merge` it is a merge patch instead: an apply removes no entry of a set that another
    manager owns as well.
    """

    kind: Kind[Any]
    body: JsonObject
    uid: str = ""
    merge: bool = False

    @property
    def name(self) -> str:
        """`metadata.name` of the body."""
        metadata = self.body["metadata"]
        assert isinstance(metadata, dict)
        return str(metadata["name"])


class Delete(Struct, frozen=True, kw_only=True):
    """Deletion of exactly the object with this UID.

    With `collection`, name and UID are those of a Job, and its pods that have not ended are deleted
    with one request.
    """

    kind: Kind[Any]
    namespace: str
    name: str
    uid: str
    resource_version: str = ""
    propagation: Literal["Background", "Foreground"] = "Background"
    grace_seconds: int | None = None
    collection: bool = False

    @classmethod
    def of(
        cls,
        kind: Kind[Any],
        metadata: ObjectMeta | ChildMeta,
        *,
        resource_version: str = "",
        grace_seconds: int | None = None,
    ) -> "Delete":
        """Return the deletion of the object with this metadata.

        With `resource_version` the API server refuses it once the object has changed. Without
        `grace_seconds` the grace period of the object applies.
        """
        return cls(
            kind=kind,
            namespace=metadata.namespace,
            name=metadata.name,
            uid=metadata.uid,
            resource_version=resource_version,
            grace_seconds=grace_seconds,
        )


class Event(Struct, frozen=True):
    """An event regarding the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class Plan(Struct, frozen=True, kw_only=True):
    """The writes, in this order: applies, deletes of objects, status, events, other deletes.

    With `status_before_deletes` the status comes before the deletes, because only the status then
    records what they delete. `status` is None if the present one is up to date. `requeue_after` is
    in seconds.
    """

    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status_before_deletes: bool = False
    status: TorchrunJobStatus | None = None
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
