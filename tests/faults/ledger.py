"""Quotas, usage and failures, computed from the store only, independent of the controller.

A `Ledger` checks every change, so it detects a quota that is exceeded for only a second.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta

from bodies import Body
from faults.cluster import JOBS, PODS, TORCHRUN_JOBS, TORCHRUN_QUEUES, is_worker, owners
from faults.store import Change, Store, key_of
from faults.usage import KINDS, Amounts, Usage, amounts_of, charge_of
from gates import may_train
from torchrun_api import names
from torchrun_api.kinds.status import TERMINAL
from torchrun_controller.reconcile.model.conditions import BLOCKED_REASONS

# The maximum age of a cache: a decision by an earlier quota is no violation.
LAG = timedelta(seconds=150)
# A job may be overcharged this long, while its gang is replaced.
OVERCHARGED = timedelta(seconds=300)

# Reasons of a wait that ends only if somebody acts, without that whose text the API server writes.
NEED_AN_ACTION = (BLOCKED_REASONS | {"WaitingForFence"}) - {"Rejected"}
# What ends a wait: a sentence that tells the user what to do, a command, or nodes for the
# scheduler.
ADVICE = re.compile(
    r"(?:^|[.)] )(?:Change|Choose|Correct|Create|Delete|Enable|Fix|Increase|Install|Lower|Remove|Request"
    r"|Set|Submit|Upload|Use) "
    r"|\bkubectl [a-z]+ "
    r"|\b\d+/\d+ nodes? available\b"
)


# The message of a launcher whose ranks stopped together because a pod had to end.
STOPPED = re.compile('"reason": "(Peer)?Stopped"')


class Ledger:
    """Watches a store; `report` is called with each violation."""

    def __init__(
        self, store: Store, now: Callable[[], datetime], report: Callable[[str], None]
    ) -> None:
        self._store = store
        self._now = now
        self._report = report
        self.usage = Usage(store)
        # Every quota of each queue, with its start time.
        self._quotas: dict[tuple[str, str], list[tuple[datetime, Body]]] = defaultdict(list)
        self._left: dict[str, Body] = {}  # jobs that were deleted, by UID
        self._failed: dict[str, set[str]] = defaultdict(set)  # failed attempts by UID of the job
        self._failed_while_terminating: dict[str, set[str]] = defaultdict(set)
        self._failed_rounds: Counter[str] = Counter()  # by name of the job
        self._overcharged: dict[str, datetime] = {}  # start time by UID
        store.subscribe(self._changed)

    def _changed(self, change: Change) -> None:
        if change.resource == TORCHRUN_QUEUES:
            self._quotas[key_of(change.body)].append((self._now(), change.body["spec"]))
        elif change.resource == TORCHRUN_JOBS:
            self._job(change)
        elif change.resource == JOBS and change.verb == "ADDED":
            self._gang(change.body)
        elif change.resource == PODS:
            if change.verb == "ADDED" and is_worker(change.body):
                self._new_worker(change.body)
            self._pod(change.body)

    def note_failed_round(self, job: str) -> None:
        """Record a failure after which the ranks start again in the same pods."""
        self._failed_rounds[job] += 1

    def failed_attempts(self, uid: str) -> set[int]:
        """The attempts of a job in which a worker failed, by itself or while it was deleted."""
        return {int(each) for each in self._failed[uid] | self._failed_while_terminating[uid]}

    # Changes

    def _job(self, change: Change) -> None:
        job, uid = change.body, change.body["metadata"]["uid"]
        if change.verb == "DELETED":
            self._left[uid] = job
            return
        before, after = charge_of(change.old), charge_of(job)
        used = self.usage.by_gangs(uid) if before or after else Counter()
        living = self.usage.living(uid) if before or after else []
        # Gangs that run without a charge get one without a decision: the queue begins to take part,
        # or pods have come back with a lost machine.
        if after - before and (before or not (used or living)):
            self._within_quota(job, f"{change.name} is charged for {_list(after)}")
        if before - after and (rest := used - after):
            self._report(
                f"{change.name} is charged for {_list(after)}, and uses {_list(rest)} more"
            )
        for count in ("restarts", "disruptions"):
            old, new = (body.get("status", {}).get(count, 0) for body in (change.old or {}, job))
            # A head that succeeds after the failure of a worker ends the same attempt.
            if new < old and job.get("status", {}).get("phase") != "Succeeded":
                self._report(f"{change.name} has {new} {count} after {old}")
        failed = self._failed[uid] | self._failed_while_terminating[uid]
        failures = len(failed) + self._failed_rounds[job["metadata"]["name"]]
        if (restarts := _restarts(job)) > failures:
            self._report(f"{change.name} counts {restarts} of {failures} failures")
        self._note_overcharge(change.name, job, len(living))
        status = job.get("status", {})
        if status.get("reason") in NEED_AN_ACTION and status["phase"] not in TERMINAL:
            self._needs_advice(job)

    def _gang(self, child: Body) -> None:
        job = self._job_of(child)
        if job is None or not self._takes_part(job):
            return
        size = amounts_of(self.usage.latest(job["metadata"]["uid"]))
        name = child["metadata"]["name"]
        if size - charge_of(job):
            charge = _list(charge_of(job))
            self._report(f"gang {name} has {_list(size)} and is charged for {charge}")
        self._within_quota(job, f"gang {name} is created", since=_admitted(job))

    def _new_worker(self, pod: Body) -> None:
        job = self.usage.job(self.usage.job_of(pod))
        if job is not None and self._takes_part(job):
            self._within_quota(job, f"{pod['metadata']['name']} is created", since=_admitted(job))

    def _pod(self, pod: Body) -> None:
        """Record attempts in which a worker failed by itself.

        The failure of a worker that is being deleted may count as one, or as its deletion. A
        planned stop is none.
        """
        meta, status = pod["metadata"], pod["status"]
        if status["phase"] != "Failed" or status.get("reason") == "Evicted" or not is_worker(pod):
            return
        is_terminating = "deletionTimestamp" in meta
        failed = self._failed_while_terminating if is_terminating else self._failed
        ends = [each["state"].get("terminated", {}) for each in status.get("containerStatuses", ())]
        if any(end.get("exitCode") and not STOPPED.search(end.get("message", "")) for end in ends):
            failed[self.usage.job_of(pod)].add(meta["labels"][names.ATTEMPT_LABEL])

    def _note_overcharge(self, name: str, job: Body, living: int) -> None:
        uid, status = job["metadata"]["uid"], job.get("status", {})
        if status.get("phase") != "Running" or charge_of(job)["nodes"] <= living:
            self._overcharged.pop(uid, None)
            return
        since = self._overcharged.setdefault(uid, self._now())
        if self._now() - since > OVERCHARGED:
            charge = _list(charge_of(job))
            self._report(f"{name} is charged for {charge} and has {living} pods")

    # Usage

    def _within_quota(self, job: Body, what: str, since: datetime | None = None) -> None:
        """Check the usage of the job's cohort against its recent quotas, or those since `since`."""
        queue = _queue_of(job)
        if not self._takes_part(job):
            return
        members = self._cohort(queue)
        start = min(since or self._now(), self._now()) - LAG
        taken = self._taken(members)
        for kind in KINDS:
            limits = [self._largest(member, kind, start) for member in members]
            if self._largest(queue, kind, start) is None:
                continue  # the queue neither lends nor borrows this resource
            allowed = sum(limit for limit in limits if limit is not None)
            if taken[kind] > allowed:
                self._report(f"{what}: {taken[kind]} {kind} are taken of {allowed}")

    def _taken(self, members: set[tuple[str, str]]) -> Amounts:
        """The usage of admitted jobs, and of what is left of deleted jobs."""
        taken: Amounts = Counter()
        for job in self._store.bodies(TORCHRUN_JOBS):
            if _queue_of(job) in members:
                taken += self.usage.taken(job)
        for uid, job in self._left.items():
            if _queue_of(job) in members and self._takes_part(job):
                taken += self.usage.of_deleted(uid)
        return taken

    def _cohort(self, queue: tuple[str, str]) -> set[tuple[str, str]]:
        cohort = self._quotas[queue][-1][1].get("cohort") if self._quotas[queue] else None
        if cohort is None:
            return {queue}
        return {
            key for key, history in self._quotas.items() if history[-1][1].get("cohort") == cohort
        }

    def _largest(self, queue: tuple[str, str], kind: str, since: datetime) -> int | None:
        """The largest limit of a queue since a time; None without a limit."""
        history = self._quotas[queue]
        starts = [time for time, _ in history[1:]] + [None]
        limits = [
            spec.get("quota", {}).get(kind)
            for (_, spec), until in zip(history, starts, strict=True)
            if until is None or until >= since
        ]
        return None if None in limits or not limits else max(limits)

    def _takes_part(self, job: Body) -> bool:
        history = self._quotas[_queue_of(job)]
        return bool(history) and all(
            {"quota", "weight", "cohort"} & spec.keys() for _, spec in history[-2:]
        )

    def _job_of(self, child: Body) -> Body | None:
        return next((job for job in map(self.usage.job, owners(child)) if job is not None), None)

    # The end of a run

    def close(self, *, exact: bool = True) -> None:
        """Check the state at rest. `exact`: no user has deleted a gang while it failed."""
        for job in self._store.bodies(TORCHRUN_JOBS):
            status, name = job.get("status", {}), job["metadata"]["name"]
            uid, phase = job["metadata"]["uid"], status.get("phase")
            living = self.usage.living(uid)
            if phase in TERMINAL and charge_of(job) and not living:
                self._report(f"{name} is {phase} and charged for {_list(charge_of(job))}")
            if phase not in (*TERMINAL, "Suspended") and not self._anyone_at_work():
                self._needs_advice(job)
            failed = len(self._failed[uid]) + self._failed_rounds[name]
            counted = _restarts(job) + (phase == "Failed")
            if exact and phase in TERMINAL and failed > counted:
                self._report(f"{name} counts {counted} of {failed} failures")

    def _anyone_at_work(self) -> bool:
        """Whether ranks of any job run. Those on lost machines are not known to end."""
        pods = [pod for pod in self._store.bodies(PODS) if is_worker(pod)]
        return any(
            pod["status"]["phase"] == "Running"
            and may_train(pod, pods)
            and not self.usage.is_silent(pod)
            for pod in pods
        )

    def _needs_advice(self, job: Body) -> None:
        """Check that the message of a waiting job says what ends the wait."""
        name, status = job["metadata"]["name"], job.get("status", {})
        if not ADVICE.search(status.get("message", "")):
            why = f"{status.get('phase')}: {status.get('message')}"
            self._report(f"{name} waits without a way out: {why}")


def _list(amounts: Amounts) -> str:
    return " and ".join(f"{amounts[kind]} {kind}" for kind in KINDS if amounts[kind]) or "nothing"


def _admitted(job: Body) -> datetime | None:
    time: str | None = (job.get("status", {}).get("admission") or {}).get("time")
    return datetime.fromisoformat(time) if time else None


def _restarts(job: Body) -> int:
    count: int = job.get("status", {}).get("restarts", 0)
    return count


def _queue_of(job: Body) -> tuple[str, str]:
    return job["metadata"]["namespace"], job["spec"]["jobQueue"]
