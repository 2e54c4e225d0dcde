"""The output of reconcile: data that can be printed and compared.

Tags name the writes and checks in print: `python -m observed_log` in `tests` prints Plans.
"""

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds.meta import ChildMeta, ObjectMeta
from torchrun_api.kinds.resources import Kind
from torchrun_api.kinds.status import TorchrunJobStatus


class Apply(Struct, frozen=True, tag=True):
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


class Delete(Struct, frozen=True, kw_only=True, tag=True):
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


class StatusWrite(Struct, frozen=True, kw_only=True, tag=True):
    """The status of the job, and the events that describe its change.

    `status` is None if the present one is up to date. With `before_deletes`, only this status
    records what later writes delete: they follow once it is written. Any other status may come
    later if more urgent jobs wait, and later writes do not wait for it.
    """

    status: TorchrunJobStatus | None = None
    events: tuple[Event, ...] = ()
    before_deletes: bool = False


Write: TypeAlias = Apply | Delete | StatusWrite


class JobIsThere(Struct, frozen=True, kw_only=True, tag=True):
    """The TorchrunJob exists with this UID: the garbage collector would miss what comes later."""

    namespace: str
    name: str
    uid: str


class GangIsGone(Struct, frozen=True, kw_only=True, tag=True):
    """No child Job has this name, unless it is being deleted or belongs to somebody else.

    Otherwise a new gang would be a second one, and one that counts as deleted would still run.
    """

    namespace: str
    name: str
    owner: str  # the UID of the TorchrunJob


class PodIsUnchanged(Struct, frozen=True, kw_only=True, tag=True):
    """A pod without a machine has not changed: only a pod that waits for a while shrinks a gang.

    When a dead watch is replaced, the cache shows the machine of one pod before that of the next.
    """

    namespace: str
    name: str
    resource_version: str


class NoPodIsUnseen(Struct, frozen=True, kw_only=True, tag=True):
    """The gangs of the job have no running pods but these, which are on lost machines.

    A job that is Suspended or Preempted gives its part of the quota back. If its Job was deleted
    before the cache showed its pods, they may still run.
    """

    namespace: str
    job: str
    uids: frozenset[str]


# What the API server must confirm before the writes, because a cache that lags would make them
# harmful. Watches may lag after a change of the leader, or until a dead watch is noticed.
Check: TypeAlias = JobIsThere | GangIsGone | PodIsUnchanged | NoPodIsUnseen


class Plan(Struct, frozen=True, kw_only=True):
    """What is to be done for one job: the checks, and then the writes in this order.

    `requeue_after` is in seconds.
    """

    checks: tuple[Check, ...] = ()
    writes: tuple[Write, ...] = ()
    requeue_after: float | None = None

    @property
    def applies(self) -> tuple[Apply, ...]:
        """The applies among the writes."""
        return tuple(write for write in self.writes if isinstance(write, Apply))

    @property
    def deletes(self) -> tuple[Delete, ...]:
        """The deletes among the writes."""
        return tuple(write for write in self.writes if isinstance(write, Delete))

    @property
    def status(self) -> TorchrunJobStatus | None:
        """The new status; None if the present one is up to date."""
        writes = (write.status for write in self.writes if isinstance(write, StatusWrite))
        return next(writes, None)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, which are recorded with the status."""
        writes = (write.events for write in self.writes if isinstance(write, StatusWrite))
        return next(writes, ())
