"""A simulated API server in memory, synchronous and without a network.

The conformance tests compare it with a real one. It has the schema of a Job only, no admission and
no authorization, no other verbs and media types, and few defaults, because no test depends on them.
Source: kubernetes.io, "API Concepts" and "Server-Side Apply".
"""

import itertools
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from bodies import Body
from faults import fields
from faults.fields import Manager
from faults.selectors import matching
from faults.store import Key, Resource, Store, Stored
from torchrun_api.kinds.core import Job
from torchrun_api.kinds.resources import JOBS
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import APPLY_PATCH
from torchrun_controller.reconcile.pods.head_and_workers import TRACKED

DEFAULT_GRACE = 30
_FINISHED = ("Succeeded", "Failed")
# Stored once and served by two groups.
_ALIASES: dict[Resource, Resource] = {("events.k8s.io/v1", "events"): ("v1", "events")}
# Kinds without metadata.generation.
_NO_GENERATION = frozenset({"pods", "services", "persistentvolumeclaims", "events", "leases"})
_BEGIN_PENDING = frozenset({"Pod", "PersistentVolumeClaim"})


class Target(Struct, frozen=True):
    """The object of a path, or the collection without a name."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> Key:
        return self.namespace, self.name


def target_of(path: str) -> Target:
    """Parse a path."""
    parts = path.strip("/").split("/")
    version, rest = (
        (parts[1], parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
    )
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = (*rest, "", "")[:3]
    resource = _ALIASES.get((version, plural), (version, plural))
    return Target(resource, namespace, name, subresource)


class Write(Struct, frozen=True):
    """One write. `writer`: the client; `manager`: the field manager."""

    method: str
    target: Target
    query: Mapping[str, str]
    body: Body
    content_type: str
    writer: str


class ApiServer:
    """The server. `now`: the time of day. Refused requests raise ApiError."""

    def __init__(self, now: Callable[[], datetime], installed: tuple[Resource, ...] = ()) -> None:
        self.store = Store()
        self.installed = installed  # kinds of gang schedulers
        self.compacted = 0  # the compacted version
        self._now = now
        self._uids = itertools.count(1)

    # Reading

    def get(self, target: Target) -> Body:
        """One object."""
        return self._find_stored(target).body

    def list(self, target: Target, query: Mapping[str, str], version: int | None = None) -> Body:
        """A complete collection, now or at a version."""
        match = matching(query)
        bodies = self.store.bodies(target.resource, target.namespace)
        if version is not None:
            past = sorted(self.store.past(target.resource, version).items())
            bodies = (body for key, body in past if target.namespace in ("", key[0]))
        return {
            "kind": "List",
            "apiVersion": target.resource[0],
            "metadata": {"resourceVersion": str(version or self.store.version)},
            "items": [body for body in bodies if match(body)],
        }

    # Writing

    def write(self, write: Write) -> Body:
        """Process a POST, PATCH or DELETE."""
        target = write.target
        if write.method == "POST":
            meta = {**write.body["metadata"], "namespace": target.namespace}
            target = msgspec.structs.replace(target, name=meta["name"])
            if self.store.get(target.resource, target.key) is not None:
                refuse(409, "AlreadyExists", f"{target.resource[1]} {target.name!r} already exists")
            return self._create(write, target, {**write.body, "metadata": meta})
        if write.method == "DELETE" and not target.name:
            return self._delete_collection(write)
        if write.method == "DELETE":
            return self._delete(write, self._find_stored(target))
        if write.content_type == APPLY_PATCH:
            return self._apply(write)
        stored = self._find_stored(target)
        return self._update(write, stored, merge_patched(stored.body, write.body))

    def _create(self, write: Write, target: Target, body: Body) -> Body:
        manager = _manager(write, "Update")
        owners = fields.updated({}, body, {}, manager)
        return self._store(write, target, _event(body), owners, None)

    def _update(self, write: Write, stored: Stored, new: Body) -> Body:
        """A plain write of the new object."""
        self._check_version(stored, new["metadata"])
        body = _part(write.target, stored.body, new)
        manager = _manager(write, "Update")
        owners = fields.updated(stored.body, body, stored.owners, manager)
        return self._store(write, write.target, body, owners, stored)

    def _apply(self, write: Write) -> Body:
        target, intent = write.target, write.body
        stored = self.store.get(target.resource, target.key)
        if stored is None:
            if target.subresource:
                self._find_stored(target)
            if intent["metadata"].get("uid"):
                refuse(409, "Conflict", "uid mismatch: the provided object specified uid")
        else:
            self._check_uid(stored, intent["metadata"].get("uid"))
            self._check_version(stored, intent["metadata"])
        present = stored.body if stored else _named(intent)
        own = (
            {"status": intent.get("status", {})} if target.subresource else _without_status(intent)
        )
        owners = stored.owners if stored else {}
        manager, force = _manager(write, "Apply"), write.query.get("force") == "true"
        try:
            body, owners = fields.applied(present, own, owners, manager, force=force)
        except fields.ConflictError as error:
            refuse(409, "Conflict", f"Apply failed with 1 conflict: {error}")
        return self._store(write, target, body, owners, stored)

    def _store(
        self, write: Write, target: Target, body: Body, owners: fields.Owners, stored: Stored | None
    ) -> Body:
        """Store the object, unless it is unchanged or a dry run."""
        meta = {**body["metadata"]}
        meta.pop("resourceVersion", None)
        if stored is None:
            _check_schema(target, body)
            meta |= {"uid": f"uid-{next(self._uids)}", "creationTimestamp": stamp(self._now())}
            if target.resource[1] not in _NO_GENERATION:
                meta["generation"] = 1
            if body["kind"] in _BEGIN_PENDING:
                body = {**body, "status": {"phase": "Pending"}}
        else:
            if body == stored.body and owners == stored.owners:
                return stored.body
            if "generation" in meta and body.get("spec") != stored.body.get("spec"):
                meta["generation"] += 1
            meta["resourceVersion"] = stored.body["metadata"]["resourceVersion"]
        meta["managedFields"] = _managed(owners)
        body = {**body, "metadata": meta}
        if write.query.get("dryRun"):
            return body
        if not _holds(meta) and meta.get("deletionGracePeriodSeconds") == 0:
            return self.store.remove(target.resource, target.key, write.writer)
        return self.store.put(target.resource, body, owners, write.writer)

    def _delete(self, write: Write, stored: Stored) -> Body:
        conditions = write.body.get("preconditions", {})
        meta = stored.body["metadata"]
        for field, present in (("uid", meta["uid"]), ("resourceVersion", meta["resourceVersion"])):
            if conditions.get(field, present) != present:
                refuse(409, "Conflict", f"the {field} in the precondition is not {present}")
        seconds = _grace(stored.body, write.body.get("gracePeriodSeconds"))
        if seconds == 0 and not _holds(meta):
            return self.store.remove(write.target.resource, write.target.key, write.writer)
        before = meta.get("deletionGracePeriodSeconds", seconds)
        if meta.get("deletionTimestamp") and before <= seconds:
            return stored.body
        ending: dict[str, Any] = {
            **meta,
            "deletionTimestamp": stamp(self._now() + timedelta(seconds=seconds)),
            "deletionGracePeriodSeconds": seconds,
        }
        body = {**stored.body, "metadata": ending}
        return self.store.put(write.target.resource, body, stored.owners, write.writer)

    def _delete_collection(self, write: Write) -> Body:
        """Delete what the selectors select, one after the other. The answer is as before."""
        answer = self.list(write.target, write.query)
        for body in answer["items"]:
            meta = body["metadata"]
            key = meta["namespace"], meta["name"]
            stored = self.store.get(write.target.resource, key)
            assert stored is not None
            target = msgspec.structs.replace(write.target, name=meta["name"])
            self._delete(msgspec.structs.replace(write, target=target), stored)
        return answer

    def _find_stored(self, target: Target) -> Stored:
        stored = self.store.get(target.resource, target.key)
        if stored is None:
            refuse(404, "NotFound", f"{target.resource[1]} {target.name!r} not found")
        return stored

    def _check_uid(self, stored: Stored, uid: str | None) -> None:
        present = stored.body["metadata"]["uid"]
        if uid not in (None, present):
            message = f"metadata.uid: Invalid value: {uid!r}: field is immutable"
            refuse(422, "Invalid", message, field="metadata.uid")

    def _check_version(self, stored: Stored, meta: Body) -> None:
        wanted = meta.get("resourceVersion")
        if wanted not in (None, stored.body["metadata"]["resourceVersion"]):
            refuse(409, "Conflict", "the object has been modified")


def refuse(code: int, reason: str, message: str, field: str = "") -> NoReturn:
    """Raise an ApiError with a metav1.Status."""
    causes = [{"field": field, "message": message}] if field else []
    details = {"causes": causes}
    status = {"kind": "Status", "reason": reason, "message": message, "details": details}
    raise ApiError.from_answer(code, msgspec.json.encode(status))


def merge_patched(body: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(body) if isinstance(body, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patched(merged.get(key), value)
    return merged


def stamp(time: datetime) -> str:
    """A time in the format of objects, in whole seconds."""
    return f"{time.isoformat()[:19]}Z"


def _manager(write: Write, operation: str) -> Manager:
    name = write.query.get("fieldManager", write.writer)
    return Manager(name, operation, write.target.subresource)


def _managed(owners: fields.Owners) -> list[Body]:
    return [
        {
            "manager": manager.name,
            "operation": manager.operation,
            **({"subresource": manager.subresource} if manager.subresource else {}),
        }
        for manager in owners
    ]


def _named(body: Body) -> Body:
    meta = {
        each: body["metadata"][each] for each in ("name", "namespace") if each in body["metadata"]
    }
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": meta}


def _without_status(body: Body) -> Body:
    return {name: value for name, value in body.items() if name != "status"}


def _part(target: Target, stored: Body, new: Body) -> Body:
    """The changed part: the status for a status write, otherwise everything else.

    Pods, Jobs and PVCs have a status subresource, too.
    """
    if target.subresource == "status":
        return {**stored, "status": new.get("status", {})}
    present = {"status": stored["status"]} if "status" in stored else {}
    return {**_without_status(new), **present}


def _holds(meta: Body) -> bool:
    """Whether finalizers keep a deleted object. The Job controller removes its own at once."""
    return bool({*meta.get("finalizers", ())} - {TRACKED})


def _grace(body: Body, requested: int | None) -> int:
    """The grace period of a pod in seconds; other objects are removed at once."""
    if body.get("kind") != "Pod":
        return 0
    if not body["spec"].get("nodeName") or body.get("status", {}).get("phase") in _FINISHED:
        return 0
    default: int = body["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE)
    return default if requested is None else requested


def _event(body: Body) -> Body:
    """An Event of events.k8s.io as the core group shows it."""
    if body.get("kind") != "Event":
        return body
    body = {**body}
    body["involvedObject"] = body.pop("regarding", {})
    body["message"] = body.pop("note", "")
    return body


def _check_schema(target: Target, body: Body) -> None:
    """Refuse a Job whose fields have wrong types: templates of users have no schema before."""
    if target.resource != (JOBS.api_version, JOBS.plural):
        return
    try:
        msgspec.convert(body, Job)
    except msgspec.ValidationError as error:
        refuse(422, "Invalid", f"Job is invalid: {error}")
