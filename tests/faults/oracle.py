"""Invariants at every change, and the comparison of end states."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import msgspec

from bodies import Body
from faults.cluster import (
    JOBS,
    PODS,
    SERVICES,
    TORCHRUN_JOBS,
    TORCHRUN_QUEUES,
    index_of,
    owners,
)
from faults.ledger import Ledger
from faults.saves import Saves
from faults.store import Change, Resource, Store
from gates import has_start, may_train
from torchrun_api import names
from torchrun_api.kinds.status import TERMINAL

LEASES: Resource = ("coordination.k8s.io/v1", "leases")
EVENTS: Resource = ("v1", "events")
KAI_QUEUES: Resource = ("scheduling.run.ai/v2", "queues")
LEASE = ("system", "torchrun-controller")
NO_PROGRESS, IDLE_ATTEMPTS = "NoProgress", 3  # the default of maxAttemptsWithoutProgress

# Fields that differ between runs without meaning.
_VARIES = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z|uid-\d+")
_VARIES_IN_NAMES = re.compile(r"(?<=-gang-).*")  # the UID of the job of a Secret
# Fields of an attempt in the JSON annotation of the next gang.
_LASTED = re.compile(rb'\\"runningSeconds\\":\d+,?')
_VOLATILE = (
    *(names.START, names.NOTIFICATION_TIME, names.CLAIM_UID, "runningSeconds"),
    "stringData",  # random
)
_OF_SERVER = (
    "uid",
    "resourceVersion",
    "managedFields",
    "creationTimestamp",
    "generation",
    "deletionGracePeriodSeconds",  # the first writer that deleted a pod on a silent node
)


class Oracle:
    """Watches a store. `wrong` lists the violations in order.

    `is_ours`: whether a writer is the controller.
    """

    def __init__(
        self, store: Store, is_ours: Callable[[str], bool], now: Callable[[], datetime]
    ) -> None:
        self.wrong: list[str] = []
        self.ledger = Ledger(store, now, self._report)
        self.saves = Saves(store, self._report)
        # Workers that are deleted from the API, but whose containers may still run.
        self.unseen: Callable[[], list[Body]] = list
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
            self._finds_peers(change.old, change.body)
            self._gives_up(change.old, change.body)

    def _written(self, change: Change) -> None:
        """Check that only the lease holder writes, and no objects of others."""
        lease = self._store.get(LEASES, LEASE)
        holder = lease.body["spec"].get("holderIdentity") if lease else None
        if holder != change.writer:
            self._report(f"{change.writer} writes {change.name} while {holder} holds the lease")
        if change.resource in (TORCHRUN_JOBS, TORCHRUN_QUEUES):
            if change.old is not None and change.old["spec"] != change.body["spec"]:
                self._report(f"{change.writer} writes the spec of {change.name}")
        elif change.resource == KAI_QUEUES:
            if names.KAI_OWNER not in change.body["metadata"].get("annotations", {}):
                self._report(f"{change.writer} writes {change.name}, which is not ours")
        elif change.resource != EVENTS:
            root = self._root(change.old or change.body)
            if root not in (TORCHRUN_JOBS, TORCHRUN_QUEUES):
                self._report(f"{change.writer} writes {change.name}, which is not ours")

    def _root(self, body: Body) -> Resource | None:
        """The kind of the top-level owner of an object, which may be deleted."""
        while True:
            references = body["metadata"].get("ownerReferences", ())
            owner = next((each for each in references if each.get("controller")), None)
            if owner is None:
                return None
            if owner["apiVersion"] == TORCHRUN_JOBS[0]:
                return TORCHRUN_JOBS if owner["kind"] == "TorchrunJob" else TORCHRUN_QUEUES
            key = (body["metadata"]["namespace"], owner["name"])
            parent = self._store.get(JOBS, key) if owner["kind"] == "Job" else None
            if parent is None or parent.body["metadata"]["uid"] != owner["uid"]:
                # The Job was deleted before the pod. Only pods of TorchrunJobs have the label.
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
                self._report(f"attempt {attempt} of {owner} has a second Job {meta['name']}")
            if "workspace-source" in str(change.body["spec"]) and owner not in self._prepared:
                self._report(f"Job {meta['name']} is made before its workspace is")
        elif change.verb == "DELETED" and role == names.WORKER:
            # Workers whose head was refused never started, so they may be created again.
            self._gangs[gang] = self._gangs[owner, attempt, names.HEAD]

    def _pod(self, change: Change) -> None:
        labels = change.body["metadata"].get("labels", {})
        component = labels.get(names.COMPONENT_LABEL)
        if component == names.SYNC:
            if change.body.get("status", {}).get("phase") == "Succeeded":
                self._prepared |= owners(change.body)
            living = _living(self._store, names.SYNC)
            # A pod on a lost machine is replaced, and can publish nothing.
            reached = [pod for pod in living if not self.ledger.usage.is_silent(pod)]
            self._at_most_one("sync pod", reached, lambda pod: "")
        elif component == names.WORKER:
            workers = _living(self._store, names.WORKER)
            training = [pod for pod in workers if may_train(pod, self._store.bodies(PODS))]
            training += self.unseen()
            # The launcher of node 0 fences for its gang, and may end before the others.
            leaders = (pod for pod in self._store.bodies(PODS) if has_start(pod))
            fenced = {worker for pod in leaders for worker in _fenced_by(pod)}
            unfenced = [pod for pod in training if _worker(pod) not in fenced]
            self._at_most_one("gang that trains", unfenced, _attempt)
            self._at_most_one_of_node(training)

    def _at_most_one(self, what: str, pods: list[Body], part: Callable[[Body], str]) -> None:
        """Check each job."""
        values: dict[str, set[str]] = {}
        for pod in pods:
            meta = pod["metadata"]
            value = meta["name"] if not part(pod) else part(pod)
            values.setdefault(meta["labels"][names.JOB_LABEL], set()).add(value)
        for job, several in values.items():
            if len(several) > 1:
                self._report(f"job {job} has more than one {what}: {sorted(several)}")

    def _at_most_one_of_node(self, training: list[Body]) -> None:
        """Check that no pod may start ranks while an earlier one of its node may run."""
        found = Counter((*owners(pod), index_of(pod)) for pod in training)
        for (uid, index), count in found.items():
            if count > 1:
                self._report(f"Job {uid} has {count} pods of node {index} that may train")

    def _absorbs(self, old: Body, new: Body) -> None:
        before = old.get("status", {}).get("phase")
        after = new.get("status", {}).get("phase")
        if before in TERMINAL and before != after:
            self._report(f"{new['metadata']['name']} leaves {before} for {after}")

    def _finds_peers(self, old: Body, new: Body) -> None:
        """Check that a gang of several nodes has its Service before it counts as running."""
        phases = [body.get("status", {}).get("phase") for body in (old, new)]
        if phases[0] == "Running" or phases[1] != "Running" or new["status"]["numNodes"] == 1:
            return
        meta = new["metadata"]
        service = self._store.get(SERVICES, (meta["namespace"], meta["name"]))
        if service is None or meta["uid"] not in owners(service.body):
            self._report(f"{meta['name']} is Running without its Service")

    def _gives_up(self, old: Body, new: Body) -> None:
        """Check that NoProgress follows enough failures without a newer checkpoint."""
        reasons = [body.get("status", {}).get("reason") for body in (old, new)]
        if reasons[0] == NO_PROGRESS or reasons[1] != NO_PROGRESS:
            return
        uid, reliability = new["metadata"]["uid"], new["spec"].get("reliability", {})
        useful = max((save.attempt for save in self.saves.known(uid)), default=-1)
        idle = [number for number in self.ledger.failed_attempts(uid) if number > useful]
        if len(idle) < (limit := reliability.get("maxAttemptsWithoutProgress", IDLE_ATTEMPTS)):
            name = new["metadata"]["name"]
            self._report(f"{name} gives up after {len(idle)} failures in vain of {limit}")

    def _report(self, what: str) -> None:
        self.wrong.append(what)


def _is_ours(job: Body) -> bool:
    labels: dict[str, str] = job["metadata"].get("labels", {})
    return labels.get(names.MANAGED_BY_LABEL) == names.MANAGED_BY


def end_state(
    store: Store, *, renumbered: bool = False, varies: tuple[str, ...] = ()
) -> dict[str, Any]:
    """All objects by kind and name, without fields that differ between runs.

    With `renumbered`, numbers and counts of gangs are omitted, too. `varies` names further fields
    and conditions to omit.
    """
    left_out = (LEASES, EVENTS, *((JOBS, PODS) if renumbered else ()))
    state = {
        f"{resource[1]}/{_VARIES_IN_NAMES.sub('*', body['metadata']['name'])}": _masked(body)
        for resource, body in store.everything()
        if resource not in left_out
    }
    if renumbered:
        for body in state.values():
            body.get("status", {}).pop("attempt", None)
    for name in varies:
        for body in state.values():
            body.get("spec", {}).pop(name, None)
            body.get("status", {}).pop(name, None)
            body.get("status", {}).get("conditions", {}).pop(name, None)
    return state


def differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    """The differences of two states, one line each."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        keys = sorted(expected.keys() | actual.keys())
        return [
            line
            for key in keys
            for line in differences(expected.get(key), actual.get(key), f"{path}.{key}")
        ]
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [line for at, (a, b) in pairs for line in differences(a, b, f"{path}[{at}]")]
    return (
        []
        if expected == actual
        else [f"{path}: {expected!r} without the fault, {actual!r} with it"]
    )


def _masked(body: Body) -> Any:
    meta = {name: each for name, each in body["metadata"].items() if name not in _OF_SERVER}
    text = msgspec.json.encode({**body, "metadata": meta})
    return _ordered(msgspec.json.decode(_VARIES.sub(b"*", _LASTED.sub(b"", text))))


def _ordered(value: Any) -> Any:
    """Sort conditions, which are in the order in which they were first true.

    A gang has its start annotation from the beginning if no pod of an older gang is left. Otherwise
    it is set later, and again unless the gang has ended by then. A sync pod has the UID of its PVC
    if that was created first.
    """
    if isinstance(value, list):
        return [_ordered(each) for each in value]
    if not isinstance(value, dict):
        return value
    ordered = {key: _ordered(each) for key, each in value.items() if key not in _VOLATILE}
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


def _worker(pod: Body) -> str:
    """The attempt and the index of a worker."""
    labels = pod["metadata"]["labels"]
    return f"{labels[names.ATTEMPT_LABEL]}-{labels[names.COMPLETION_INDEX_LABEL]}"


def _fenced_by(pod: Body) -> Iterator[str]:
    """The workers that the pod's launcher fences before its ranks start, of "<time> 0:1,3-5 ..."."""
    fence: str = pod["metadata"].get("annotations", {}).get(names.FENCE, "")
    for part in fence.split()[1:]:
        attempt, _, ranges = part.partition(":")
        for each in ranges.split(","):
            first, _, last = each.partition("-")
            for index in range(int(first), int(last or first) + 1):
                yield f"{attempt}-{index}"


def _attempt(pod: Body) -> str:
    attempt: str = pod["metadata"]["labels"][names.ATTEMPT_LABEL]
    return f"attempt {attempt}"
