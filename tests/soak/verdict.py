"""Invariants of a soak test, checked by a watch of each kind."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from bodies import Body
from e2e.history import History
from integration.team import TERMINAL, trains
from soak.lives import NARROW
from torchrun_api import names
from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS, Kind


class Followed(History):
    """A history that is checked as it arrives and not stored, because hours of it are too large.

    `see` gets each state, and the last state again with True when the object is deleted. `settled`
    is called when the states so far are consistent.
    """

    def __init__(
        self,
        api: httpx.Client,
        kind: Kind[Any],
        namespace: str,
        see: Callable[[Body, bool], None],
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(api, kind, namespace)
        self._see, self._settled = see, settled
        self._live: dict[str, Body] = {}

    def __str__(self) -> str:
        return f"the {self._thread.name} has ended"

    @property
    def blind(self) -> bool:
        """Whether the watch has ended by a bug of the soak test."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def _list(self, items: list[Body]) -> None:
        present = {item["metadata"]["uid"] for item in items}
        for uid in self._live.keys() - present:
            self._see(self._live.pop(uid), True)
        for item in items:
            self._live[item["metadata"]["uid"]] = item
            self._see(item, False)
        self._settled()

    def _add(self, state: Body, *, deleted: bool = False) -> None:
        uid = state["metadata"]["uid"]
        if deleted:
            self._live.pop(uid, None)
        else:
            self._live[uid] = state
        self._see(state, deleted)
        self._settled()


class Verdict:
    """The invariants of one namespace. `wrong` lists each violation once."""

    def __init__(self, api: httpx.Client, namespace: str) -> None:
        self._namespace = namespace
        self._violations: dict[str, None] = {}
        self._lock = threading.Lock()
        self._gangs: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._pods: dict[str, dict[str, Body]] = defaultdict(dict)  # by job and UID
        self._last: dict[str, tuple[str, int]] = {}  # phase and attempt by UID
        self._admitted: set[str] = set()
        self._followed = (
            Followed(api, TORCHRUN_JOBS, namespace, self._job, self._quota),
            Followed(api, JOBS, namespace, self._child),
            Followed(api, PODS, namespace, self._pod, self._one_gang_at_a_time),
        )

    @property
    def wrong(self) -> list[str]:
        with self._lock:
            blind = [str(each) for each in self._followed if each.blind]
            return [*self._violations, *blind]

    @property
    def gangs(self) -> int:
        """Child Jobs so far."""
        return sum(map(len, list(self._gangs.values())))

    @contextmanager
    def watching(self) -> Iterator["Verdict"]:
        """Check until the end of the block."""
        with ExitStack() as stack:
            for each in self._followed:
                stack.enter_context(each.running())
            yield self

    def _report(self, what: str) -> None:
        with self._lock:
            self._violations[f"{self._namespace}: {what}"] = None

    def _job(self, job: Body, gone: bool) -> None:
        meta, status = job["metadata"], job.get("status", {})
        phase, attempt = status.get("phase", ""), status.get("attempt", 0)
        before, last = self._last.get(meta["uid"], ("", 0))
        if before in TERMINAL and phase != before:
            self._report(f"{meta['name']} leaves {before} for {phase}")
        if attempt < last:
            self._report(f"{meta['name']} goes back from attempt {last} to {attempt}")
        self._last[meta["uid"]] = (phase, attempt)
        if job["spec"]["jobQueue"] == "narrow":
            conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
            admitted = conditions.get("Admitted") == "True" and phase not in TERMINAL and not gone
            (self._admitted.add if admitted else self._admitted.discard)(meta["name"])

    def _quota(self) -> None:
        if len(self._admitted) > NARROW:
            self._report(f"more are admitted than {NARROW}: {sorted(self._admitted)}")

    def _child(self, job: Body, gone: bool) -> None:
        meta = job["metadata"]
        attempt = meta["labels"][names.ATTEMPT_LABEL]
        # A head has a second Job for its workers.
        part = f"{attempt} {meta['labels'].get(names.ROLE_LABEL, '')}"
        gang = (meta["ownerReferences"][0]["uid"], part)
        self._gangs[gang].add(meta["uid"])
        if len(self._gangs[gang]) > 1:
            self._report(f"attempt {attempt} of {meta['name']} has {len(self._gangs[gang])} Jobs")

    def _pod(self, pod: Body, gone: bool) -> None:
        meta = pod["metadata"]
        pods = self._pods[meta["labels"][names.JOB_LABEL]]
        if not gone:
            pods[meta["uid"]] = pod
        else:
            pods.pop(meta["uid"], None)
        if not pods:
            del self._pods[meta["labels"][names.JOB_LABEL]]

    def _one_gang_at_a_time(self) -> None:
        for job, pods in self._pods.items():
            live = {
                uid: pod["metadata"]["labels"][names.ATTEMPT_LABEL]
                for uid, pod in pods.items()
                if trains(pod, pods.values())
            }
            if len(set(live.values())) > 1:
                self._report(f"{job} has two gangs that train: {live}")
