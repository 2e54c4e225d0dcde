"""Simulated ranks that save checkpoints, and launchers of node 0 that report them.

Each node saves its part of a step a little later than the one before, so an end in between leaves
an incomplete checkpoint. The ledger of the real launcher decides which ones are complete. When a
pod has to end, all ranks save at once and stop, as with torchrun_progress.stopping().
"""

import json
from collections.abc import Callable
from datetime import datetime

import msgspec
from msgspec import Struct, field

from bodies import Body
from faults.cluster import JOBS, PODS, Actor, index_of, is_over, is_worker, owners
from faults.nodes import End, Nodes
from faults.replica import Process
from faults.saves import Save, Saves
from faults.store import Change, key_of
from faults.usage import attempt_of
from torchrun_api import names
from torchrun_api.kinds.status import Checkpoint
from torchrun_runtime.launch.checkpoints import describe, parse_candidates
from torchrun_runtime.launch.gang.checkpoints import (
    KEPT_SAVES,
    CheckpointLedger,
    CompleteCheckpoint,
    Saved,
    choose,
)
from torchrun_runtime.launch.output import TIME_FORMAT

# Seconds: from save to save, from node to node, until a stop is agreed on, between two looks of the
# reporter, and until it repeats an accepted and a refused report.
SAVE, LAG, AGREE, LOOK, REPEAT, RETRY = 7.0, 2.5, 0.2, 1.0, 60.0, 10.0
STEPS = 10  # from save to save


class _Gang(Struct):
    """The ranks of one gang, and the launcher of its node 0. `leader`, `job`: UIDs."""

    leader: str
    job: str
    attempt: int
    world: int
    step: int
    ledger: CheckpointLedger
    sent: tuple[CompleteCheckpoint, ...]
    next_report: float = 0.0
    saves: list[Save] = field(default_factory=list)
    is_stopped: bool = False


class Checkpoints(Actor):
    """The ranks and launchers of all gangs without a head. `leader`: the controller that leads."""

    def __init__(
        self,
        nodes: Nodes,
        saves: Saves,
        now: Callable[[], datetime],
        leader: Callable[[], Process | None],
    ) -> None:
        super().__init__(nodes.hands.server, now, "launchers")
        self._nodes, self._saves, self._leader = nodes, saves, leader
        self._gangs: dict[str, _Gang] = {}  # by the UID of the child Job
        nodes.begins, nodes.ends = self._begin, self._end

    def _begin(self, pod: Body) -> None:
        """The ranks start, from the newest checkpoint that exists."""
        meta, job = pod["metadata"], self.find(JOBS, next(iter(owners(pod)), ""))
        is_headless = names.ROLE_LABEL not in meta["labels"]
        if job is None or not (is_worker(pod) and index_of(pod) == "0" and is_headless):
            return
        uid, ledger = meta["labels"][names.JOB_UID_LABEL], CheckpointLedger()
        annotation = meta.get("annotations", {}).get(names.COMPLETE_CHECKPOINTS, "")
        ledger.inherit(candidates := parse_candidates(annotation))
        paths = [each.path for each in candidates]
        missing = [place for place, path in enumerate(paths) if not self._saves.exists(path)]
        chosen, _ = choose(candidates, {0: missing})
        self._saves.check_resumption(uid, paths, chosen.path if chosen else None)
        step, world = chosen.step if chosen else 0, job["spec"]["completions"]
        gang = _Gang(meta["uid"], uid, attempt_of(pod), world, step, ledger, ledger.newest)
        self._gangs[job["metadata"]["uid"]] = gang
        self._loop.call_later(SAVE, self._save, gang)
        self._loop.call_later(LOOK, self._report_saves, gang)

    # The ranks

    def _save(self, gang: _Gang) -> None:
        """Node 0 saves the next step, and the others follow."""
        if self._trains(gang):
            save = self._add_save(gang)
            for index in range(gang.world):
                self._loop.call_later(index * LAG, self._save_part, gang, save, index)
            self._loop.call_later(SAVE, self._save, gang)

    def _add_save(self, gang: _Gang) -> Save:
        gang.step += STEPS
        time = self._now().strftime(TIME_FORMAT)
        save = self._saves.add(gang.job, gang.attempt, gang.step, gang.world, time)
        gang.saves = [*gang.saves[1 - KEPT_SAVES :], save]
        return save

    def _save_part(self, gang: _Gang, save: Save, index: int) -> None:
        pods = [pod for pod in self._pods(gang) if index_of(pod) == str(index) and not is_over(pod)]
        if pods and not gang.is_stopped:
            save.ranks.add(index)
            parts = (Saved(s.step, s.world, tuple(s.ranks), s.path, s.time) for s in gang.saves)
            gang.ledger.note([tuple(parts)])

    def changed(self, change: Change) -> None:
        if change.resource == PODS and "deletionTimestamp" in change.body["metadata"]:
            for child in owners(change.body) & self._gangs.keys():
                self._loop.call_later(AGREE, self._stop, self._gangs[child])

    def _stop(self, gang: _Gang) -> None:
        """All ranks save and stop, unless one has ended or is not reached."""
        pods = [pod for pod in self._pods(gang) if not is_over(pod) and self._nodes.reaches(pod)]
        if gang.is_stopped or len(pods) < gang.world:
            return
        save = self._add_save(gang)
        for index in range(gang.world):
            self._save_part(gang, save, index)
        gang.is_stopped = True
        self._saves.note_stop(gang.job, gang.attempt)
        self._send(gang)
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                self._nodes.end(pod["metadata"]["uid"], End(0))

    def _end(self, pod: Body, end: End) -> End:
        """The end of a pod, with the message of its launcher."""
        gang = next((self._gangs[child] for child in owners(pod) if child in self._gangs), None)
        if gang is None:
            return end
        reason = "Stopped" if "deletionTimestamp" in pod["metadata"] else "PeerStopped"
        code, reason = (143, reason) if gang.is_stopped else (end.exit_code, "ExitCode")
        message: Body = {"exitCode": code, "reason": reason, "message": end.message} if code else {}
        if pod["metadata"]["uid"] == gang.leader and gang.ledger.newest:
            message["checkpoints"] = describe(gang.ledger.newest)
        return End(end.seconds, code, json.dumps(message))

    def _pods(self, gang: _Gang) -> list[Body]:
        pods = self.store.bodies(PODS)
        return [pod for pod in pods if any(self._gangs.get(uid) is gang for uid in owners(pod))]

    def _trains(self, gang: _Gang) -> bool:
        pod = self.find(PODS, gang.leader)
        return pod is not None and not is_over(pod) and not gang.is_stopped

    # The launcher of node 0

    def _report_saves(self, gang: _Gang) -> None:
        newest = gang.ledger.newest
        if self._trains(gang):
            if newest and (newest != gang.sent or self._loop.time() >= gang.next_report):
                self._send(gang)
            self._loop.call_later(LOOK, self._report_saves, gang)

    def _send(self, gang: _Gang) -> None:
        """Report as to the endpoint of the controller, without HTTP and tokens."""
        gang.sent, gang.next_report = gang.ledger.newest, self._loop.time() + RETRY
        pod, process = self.find(PODS, gang.leader), self._leader()
        if pod is None or process is None:
            return
        factory = process.components.factory
        if (worker := factory.worker(*key_of(pod), gang.leader)) is not None:
            gang.next_report = self._loop.time() + REPEAT
            newest = msgspec.convert(describe(gang.sent), tuple[Checkpoint, ...])
            factory.reports.put_checkpoints(worker.job, worker.job_uid, newest)
            process.components.queues["job"].add(worker.job)
            self._saves.note_report([c.path for c in newest], lambda: process.client.alive)
