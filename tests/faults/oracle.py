"""What must hold at every change of the world, whatever happens, and what is compared at the end."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from faults.cluster import JOBS, PODS, owners
from faults.fields import Body
from faults.store import Change, Resource, Store
from torchrun_api import names
from torchrun_controller.reconcile.phases import TERMINAL

LEASES: Resource = ("coordination.k8s.io/v1", "leases")
EVENTS: Resource = ("v1", "events")
TORCHRUN_JOBS: Resource = ("torchrun.ai/v1alpha1", "torchrunjobs")
TORCHRUN_QUEUES: Resource = ("torchrun.ai/v1alpha1", "torchrunqueues")
LEASE = ("system", "torchrun-controller")

# What tells one run from another and means nothing.
_VARIES = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z|uid-\d+")
_TOLD = (names.START, names.TOLD, "runningSeconds")
_OF_SERVER = ("uid", "resourceVersion", "managedFields", "creationTimestamp", "generation")


class Oracle:
    """Watches a store. `wrong` says what was violated, in the order in which it was.

    `is_ours` tells whether a writer is the controller.
    """

    def __init__(self, store: Store, is_ours: Callable[[str], bool]) -> None:
        self.wrong: list[str] = []
        self._store = store
        self._is_ours = is_ours
        # By UID of the job, attempt and role
        self._gangs: Counter[tuple[str, str, str | None]] = Counter()
        self._prepared: set[str] = set()  # UIDs of jobs whose sync pod has succeeded
        store.subscribe(self._changed)

    def _changed(self, change: Change) -> None:
        if self._is_ours(change.writer) and change.resource != LEASES:
            self._written(change)
        if change.resource == PODS:
            self._pod(change)
        elif change.resource == JOBS and _is_ours(change.body):
            self._gang(change)
        elif change.resource == TORCHRUN_JOBS and change.old is not None:
            self._absorbs(change.old, change.body)

    def _written(self, change: Change) -> None:
        """By the holder of the lease alone, and nothing of others."""
        lease = self._store.get(LEASES, LEASE)
        holder = lease.body["spec"].get("holderIdentity") if lease else None
        if holder != change.writer:
            self._say(f"{change.writer} writes {change.name} while {holder} holds the lease")
        if change.resource in (TORCHRUN_JOBS, TORCHRUN_QUEUES):
            if change.old is not None and change.old["spec"] != change.body["spec"]:
                self._say(f"{change.writer} writes the spec of {change.name}")
        elif change.resource != EVENTS:
            held = self._root(change.old or change.body)
            if held not in (TORCHRUN_JOBS, TORCHRUN_QUEUES):
                self._say(f"{change.writer} writes {change.name}, which is not ours")

    def _root(self, body: Body) -> Resource | None:
        """The kind of what controls an object in the end; that may be gone by now."""
        while True:
            held = body["metadata"].get("ownerReferences", ())
            owner = next((each for each in held if each.get("controller")), None)
            if owner is None:
                return None
            if owner["apiVersion"] == TORCHRUN_JOBS[0]:
                return TORCHRUN_JOBS if owner["kind"] == "TorchrunJob" else TORCHRUN_QUEUES
            key = (body["metadata"]["namespace"], owner["name"])
            parent = self._store.get(JOBS, key) if owner["kind"] == "Job" else None
            if parent is None or parent.body["metadata"]["uid"] != owner["uid"]:
                # Its Job went before it: the pods of ours bear our label, and nobody else's do.
                ours = names.JOB_LABEL in body["metadata"].get("labels", {})
                return TORCHRUN_JOBS if ours else None
            body = parent.body

    def _gang(self, change: Change) -> None:
        meta = change.body["metadata"]
        (owner,) = owners(change.body)
        attempt, role = meta["labels"][names.ATTEMPT_LABEL], meta["labels"].get(names.ROLE_LABEL)
        gang = owner, attempt, role
        if change.verb == "ADDED":
            self._gangs[gang] += 1
            if self._gangs[gang] > 1:
                self._say(f"attempt {attempt} of {owner} has a second Job {meta['name']}")
            if "workspace-source" in str(change.body["spec"]) and owner not in self._prepared:
                self._say(f"Job {meta['name']} is made before its workspace is")
        elif change.verb == "DELETED" and role == names.WORKER:
            # Workers whose head was refused have never begun: they may be made once more.
            self._gangs[gang] = self._gangs[owner, attempt, names.HEAD]

    def _pod(self, change: Change) -> None:
        labels = change.body["metadata"].get("labels", {})
        component = labels.get(names.COMPONENT_LABEL)
        if component == names.SYNC:
            if change.body.get("status", {}).get("phase") == "Succeeded":
                self._prepared |= owners(change.body)
            self._at_most_one("sync pod", _living(self._store, names.SYNC), lambda pod: "")
        elif component == names.WORKER:
            training = [pod for pod in _living(self._store, names.WORKER) if _trains(pod)]
            self._at_most_one("gang that trains", training, _attempt)

    def _at_most_one(self, what: str, pods: list[Body], part: Callable[[Body], str]) -> None:
        """For each job."""
        found: dict[str, set[str]] = {}
        for pod in pods:
            meta = pod["metadata"]
            told = meta["name"] if not part(pod) else part(pod)
            found.setdefault(meta["labels"][names.JOB_LABEL], set()).add(told)
        for job, several in found.items():
            if len(several) > 1:
                self._say(f"job {job} has more than one {what}: {sorted(several)}")

    def _absorbs(self, old: Body, new: Body) -> None:
        before = old.get("status", {}).get("phase")
        after = new.get("status", {}).get("phase")
        if before in TERMINAL and before != after:
            self._say(f"{new['metadata']['name']} leaves {before} for {after}")

    def _say(self, what: str) -> None:
        self.wrong.append(what)


def _is_ours(job: Body) -> bool:
    return job["metadata"].get("labels", {}).get(names.MANAGED_BY_LABEL) == names.MANAGED_BY


def end_state(store: Store, *, renumbered: bool = False) -> dict[str, Any]:
    """All there is, by kind and name, without what tells one run from another.

    Of gangs that may be `renumbered` neither the number nor what there is of each counts.
    """
    left_out = (LEASES, EVENTS, *((JOBS, PODS) if renumbered else ()))
    state = {
        f"{resource[1]}/{body['metadata']['name']}": _masked(body)
        for resource, body in store.everything()
        if resource not in left_out
    }
    if renumbered:
        for body in state.values():
            body.get("status", {}).pop("attempt", None)
    return state


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Where two states differ, a line each."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        keys = sorted(wanted.keys() | found.keys())
        return [
            line
            for key in keys
            for line in differences(wanted.get(key), found.get(key), f"{path}.{key}")
        ]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [line for at, (a, b) in pairs for line in differences(a, b, f"{path}[{at}]")]
    return [] if wanted == found else [f"{path}: {wanted!r} without the fault, {found!r} with it"]


def _masked(body: Body) -> Any:
    meta = {name: each for name, each in body["metadata"].items() if name not in _OF_SERVER}
    text = msgspec.json.encode({**body, "metadata": meta})
    return _ordered(msgspec.json.decode(_VARIES.sub(b"*", text)))


def _ordered(value: Any) -> Any:
    """Conditions come in the order in which they were first true.

    A gang has its go-ahead from the start where no pod of an older one is left, else later, and
    then again unless it has ended by then.
    """
    if not isinstance(value, dict):
        return value
    ordered = {key: _ordered(each) for key, each in value.items() if key not in _TOLD}
    if not ordered.get("annotations", True):
        del ordered["annotations"]
    if "conditions" in ordered:
        ordered["conditions"] = {each["type"]: each for each in ordered["conditions"]}
    return ordered


def _living(store: Store, component: str) -> list[Body]:
    return [
        pod
        for pod in store.bodies(PODS)
        if pod["metadata"].get("labels", {}).get(names.COMPONENT_LABEL) == component
        and pod["status"]["phase"] not in ("Succeeded", "Failed")
    ]


def _trains(pod: Body) -> bool:
    return names.START in pod["metadata"].get("annotations", {})


def _attempt(pod: Body) -> str:
    attempt: str = pod["metadata"]["labels"][names.ATTEMPT_LABEL]
    return f"attempt {attempt}"
