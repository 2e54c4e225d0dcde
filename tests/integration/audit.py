"""The audit log of the API server: writer, object and time of each write."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from log_files import find_end, read_complete_lines

CREATED = 201
GIVEN_UP = 504
# The longest delay of a stalled API server: the timeout of the client, which is gone by then.
UNREAD_SECONDS = 30.0
WRITES = ["create", "update", "patch", "delete"]
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Request",
            "verbs": WRITES,
            "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}],
        },
        {"level": "Metadata", "verbs": WRITES},
        {"level": "None"},
    ],
}
_AGENT = re.compile(r"torchrun-controller/(\w+)(?: \((\S+)\))?")


class Write(NamedTuple):
    """A write of a controller. `who`: its identity. `began`, `ended`: seconds since the epoch."""

    who: str
    began: float
    ended: float
    verb: str
    resource: str
    name: str
    code: int
    body: Any

    @property
    def takes_lease(self) -> bool:
        """Whether it acquired or renewed the lease."""
        return self.resource == "leases" and self.code < 300 and self.holder == self.who

    @property
    def releases_lease(self) -> bool:
        """Whether it left the lease without a holder."""
        return self.resource == "leases" and self.code < 300 and not self.holder

    @property
    def holder(self) -> str:
        """The holder in a write of the lease."""
        holder: str = (self.body or {}).get("spec", {}).get("holderIdentity", "")
        return holder


class Tenure(NamedTuple):
    """The time in which a process held the lease, in seconds since the epoch."""

    who: str
    since: float
    until: float


class AuditLog:
    """The audit log of an API server that was started with `flags`."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._policy = folder / "policy.json"
        self._policy.write_text(json.dumps(POLICY))

    @property
    def flags(self) -> list[str]:
        """The flags of the API server."""
        return [f"--audit-policy-file={self._policy}", f"--audit-log-path={self._log}"]

    @property
    def path(self) -> Path:
        """The path of the log, with one JSON line for each write."""
        return self._log

    def size(self) -> int:
        """The current size of the log in bytes, without an incomplete line at its end."""
        return find_end(self._log)

    def writes(self, start: int = 0) -> list[Write]:
        """Writes of controllers after this position of the log, in the order of their receipt."""
        lines = read_complete_lines(self._log, start)
        entries = [write for line in lines if (write := _write(json.loads(line)))]
        return sorted(entries, key=lambda write: write.began)


def tenures(writes: Iterable[Write]) -> Iterator[Tenure]:
    """The successive holders of the lease; the last one has an open end."""
    holder, since = "", 0.0
    changes = (w for w in writes if w.resource == "leases" and w.code < 300)
    for write in sorted(changes, key=lambda write: write.ended):
        if write.holder == holder:
            continue
        if holder:
            yield Tenure(holder, since, write.ended)
        holder, since = write.holder, write.began
    if holder:
        yield Tenure(holder, since, float("inf"))


def count_creations(writes: Iterable[Write], resource: str) -> Counter[str]:
    """The number of creations of each object.

    A request with status 504, whose process was gone, may have been processed. It counts if no
    later request created the object.
    """
    counts: Counter[str] = Counter()
    given_up: set[str] = set()
    for write in writes:
        if write.resource == resource and write.code == GIVEN_UP:
            given_up.add(write.name)
        elif write.resource == resource and write.code == CREATED:
            counts[write.name] += 1
    return counts + Counter(given_up - counts.keys())


def without_lease(writes: Iterable[Write], *, frozen: bool = False) -> list[Write]:
    """Writes of processes that did not hold the lease when the write arrived or was answered.

    Refused requests do not count: a leader that was frozen between its check and its send has one
    request left, which the resourceVersion or UID of the object stops. Requests that timed out do
    not count either: the API server may have read them long after they were sent.

    `frozen`: leaders were frozen. The request that such a leader has left may also create an object
    that the next leader has not created yet, which nothing can refuse.
    """
    writes = list(writes)
    tenures_of: dict[str, list[Tenure]] = {}
    for tenure in tenures(writes):
        tenures_of.setdefault(tenure.who, []).append(tenure)

    def within(write: Write) -> bool:
        ended = write.began - UNREAD_SECONDS if write.code == GIVEN_UP else write.ended
        return any(
            t.since <= write.began and ended <= t.until for t in tenures_of.get(write.who, ())
        )

    late = [
        write
        for write in writes
        if write.resource != "leases" and not 400 <= write.code < 500 and not within(write)
    ]
    # The first late write of each process.
    left = {write.who: write for write in reversed(late)} if frozen else {}
    return [write for write in late if write.code != CREATED or left.get(write.who) is not write]


def _write(entry: dict[str, Any]) -> Write | None:
    agent = _AGENT.match(entry.get("userAgent", ""))
    # Reviews of tokens and permissions use create but store nothing, like dry runs.
    if agent is None or agent[1] == "review" or "dryRun=" in entry["requestURI"]:
        return None
    about = entry.get("objectRef", {})
    return Write(
        who=agent[2] or "",
        began=_seconds(entry["requestReceivedTimestamp"]),
        ended=_seconds(entry["stageTimestamp"]),
        verb=entry["verb"],
        resource="/".join(filter(None, (about.get("resource"), about.get("subresource")))),
        name=about.get("name", ""),
        code=entry.get("responseStatus", {}).get("code", 0),
        body=entry.get("requestObject"),
    )


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
