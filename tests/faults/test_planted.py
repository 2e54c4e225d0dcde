"""The fault suite detects planted bugs of the controller.

Each is a bug that a change could introduce, and a few faults of one kind must reveal it.
"""

import inspect
import math
from collections.abc import Callable, Iterator

import pytest

from faults import campaign
from torchrun_api.kinds.meta import ChildMeta
from torchrun_controller.cache import admission_view
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.controllers import live_reads
from torchrun_controller.leader.election import Election
from torchrun_controller.reconcile.admission.quota import RESOURCES, QueueQuota, Usage
from torchrun_controller.reconcile.gang import checkpoints, fence, gang, gate, headway, state
from torchrun_controller.reconcile.gang.restarts import Counts, FailureAction
from torchrun_controller.reconcile.job import dependencies, steps
from torchrun_controller.reconcile.job.running import service_refused
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.spec import requests
from torchrun_controller.reconcile.workspace import preparation
from torchrun_controller.reconcile.workspace.helper_pods import SyncState, WorkspaceStep
from torchrun_controller.watch.watcher import Watcher
from torchrun_controller.workqueue import WorkQueue
from torchrun_runtime.launch.gang import checkpoints as ledger


def owner_check_is_dropped(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(ChildMeta, "controlled_by", lambda self, uid: True)


def requeue_is_forgotten(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(WorkQueue, "add_rate_limited", lambda self, key, priority=0: None)


def job_is_applied_before_the_sync(plant: pytest.MonkeyPatch) -> None:
    ready = WorkspaceStep(state=SyncState.READY, why=preparation.SYNCED)
    plant.setattr(preparation, "prepare", lambda *_: ready)


def expired_is_ignored(plant: pytest.MonkeyPatch) -> None:
    original = Watcher._back_off

    def back_off(self: object, now: float, reason: str, message: str, **how: object) -> object:
        return original(self, now, reason, message, **{**how, "relist": reason != "Expired"})

    plant.setattr(Watcher, "_back_off", back_off)


def caches_are_trusted(plant: pytest.MonkeyPatch) -> None:
    async def verify(*_: object) -> None:
        return

    plant.setattr(Expectations, "behind", lambda self, owner: None)
    plant.setattr(live_reads, "verify", verify)


def quotas_are_ignored(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(QueueQuota, "shortage", lambda self, usage: None)
    plant.setattr(QueueQuota, "exceeded", lambda self, usage: None)


def gpus_have_no_quota(plant: pytest.MonkeyPatch) -> None:
    _ignore_quota(plant, "gpus")


def jobs_have_no_quota(plant: pytest.MonkeyPatch) -> None:
    _ignore_quota(plant, "jobs")


def _ignore_quota(plant: pytest.MonkeyPatch, kind: str) -> None:
    original = QueueQuota.shortages

    def shortages(self: QueueQuota, usage: Usage) -> Iterator[int]:
        return (resource for resource in original(self, usage) if RESOURCES[resource] != kind)

    plant.setattr(QueueQuota, "shortages", shortages)


def deleted_jobs_use_nothing(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(admission_view, "orphaned_workloads", lambda *_: ())


def an_edit_needs_no_admission(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(requests, "pod_shortfall", lambda *_: "")


def failures_are_not_counted(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Counts, "after", lambda self, counted: self)


def a_wait_names_no_way_out(plant: pytest.MonkeyPatch) -> None:
    def first_sentence(reason: str, message: str) -> Reason:
        return Reason(reason, message.partition(". ")[0] + ".")

    plant.setattr(dependencies, "Reason", first_sentence)


def a_closed_gate_names_no_way_out(plant: pytest.MonkeyPatch) -> None:
    reason = Reason("WaitingForFence", "Pods of the previous attempt may still run.")
    plant.setattr(gate, "_unfenced_reason", lambda *_: reason)


def gangs_run_without_their_service(plant: pytest.MonkeyPatch) -> None:
    # The tests of reconcile wrap each step for the whole session.
    others = (step for step in steps.STEPS if inspect.unwrap(step.decide) is not service_refused)
    plant.setattr(steps, "STEPS", tuple(others))


def lost_nodes_are_trusted(plant: pytest.MonkeyPatch) -> None:
    none = fence.BlockingPods()
    plant.setattr(fence, "blocking_pods", lambda *_: none)


def suspensions_are_trusted(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(state, "find_loss_in_suspension", lambda *_: (None, None))


def the_number_of_an_attempt_comes_again(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(gang, "next_attempt", lambda job, *_: max(job.status.attempt, 1))


def a_new_gang_gets_no_checkpoints(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(checkpoints, "annotate", lambda known: {})


def an_older_checkpoint_replaces_a_newer_one(plant: pytest.MonkeyPatch) -> None:
    # A new process does not read those in the status, and gets the others again from pods.
    plant.setattr(checkpoints, "_in_status", lambda status: ())


def a_part_of_a_checkpoint_suffices(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(ledger, "_is_of_all", lambda *_: True)


def planned_stops_are_counted(plant: pytest.MonkeyPatch) -> None:
    original = Counts.after
    plant.setattr(Counts, "after", lambda self, action: original(self, FailureAction.RESTART))


def the_job_gives_up_one_attempt_too_early(plant: pytest.MonkeyPatch) -> None:
    original = headway.find_stagnation
    plant.setattr(headway, "find_stagnation", lambda job, ends, n: original(job, ends, n - 1))


def a_lease_is_taken_early(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Election, "_free_at", lambda self: -math.inf)


def writes_need_no_lease(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Election, "writable_until", lambda self: math.inf)


def changes_during_a_reconcile_are_lost(plant: pytest.MonkeyPatch) -> None:
    original = WorkQueue.add

    def add(self: WorkQueue[object], key: object, priority: int = 0) -> None:
        if key not in self._processing:
            original(self, key, priority)

    plant.setattr(WorkQueue, "add", add)


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (owner_check_is_dropped, "success", "dropped"),
    (requeue_is_forgotten, "success", "500"),
    (job_is_applied_before_the_sync, "workspace", "dropped"),
    (expired_is_ignored, "success", "watch-compacted"),
    (caches_are_trusted, "success", "watch-delayed"),
    (quotas_are_ignored, "gangs", "dropped"),
    (gpus_have_no_quota, "preemption", "dropped"),
    (gpus_have_no_quota, "reclaim", "dropped"),
    (jobs_have_no_quota, "deletion under quota", "dropped"),
    (deleted_jobs_use_nothing, "deletion under quota", "dropped"),
    (an_edit_needs_no_admission, "requests edited", "dropped"),
    (a_wait_names_no_way_out, "waiting", "dropped"),
    (a_closed_gate_names_no_way_out, "node returns", "dropped"),
    (a_closed_gate_names_no_way_out, "node stays lost", "dropped"),
    (failures_are_not_counted, "restart", "dropped"),
    (gangs_run_without_their_service, "service taken", "dropped"),
    (lost_nodes_are_trusted, "node returns", "dropped"),
    (suspensions_are_trusted, "suspended", "dropped"),
    (the_number_of_an_attempt_comes_again, "restart", "dropped"),
    (a_new_gang_gets_no_checkpoints, "planned stops", "dropped"),
    (an_older_checkpoint_replaces_a_newer_one, "planned stops", "crash-after-commit"),
    (a_part_of_a_checkpoint_suffices, "planned stops", "dropped"),
    (planned_stops_are_counted, "planned stops", "dropped"),
    (the_job_gives_up_one_attempt_too_early, "no progress", "dropped"),
    (a_lease_is_taken_early, "leader", "dropped"),
    (writes_need_no_lease, "leader", "lease-alone"),
    (changes_during_a_reconcile_are_lost, "success", "late"),
]
# Part of the report, where another difference alone would be reported as well.
REPORTED = {
    quotas_are_ignored: "nodes are taken of",
    gpus_have_no_quota: "gpus are taken of",
    jobs_have_no_quota: "jobs are taken of",
    deleted_jobs_use_nothing: "jobs are taken of",
    an_edit_needs_no_admission: "gpus are taken of",
    a_wait_names_no_way_out: "waits without a way out",
    a_closed_gate_names_no_way_out: "waits without a way out",
    gangs_run_without_their_service: "is Running without its Service",
    lost_nodes_are_trusted: "more than one gang that trains",
    suspensions_are_trusted: "pods of node 1 that may train",
    a_new_gang_gets_no_checkpoints: "resumes from save -1 and not from",
    an_older_checkpoint_replaces_a_newer_one: "shows save",
    a_part_of_a_checkpoint_suffices: "which is not complete",
    planned_stops_are_counted: "counts 1 of 0 failures",
    the_job_gives_up_one_attempt_too_early: "gives up after 1 failures in vain of 2",
    a_lease_is_taken_early: "NotLeader",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "scenario", "kind"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED]
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    scenario: str,
    kind: str,
) -> None:
    trials = list(campaign.singles(scenario, kind))
    campaign.without_faults(scenario)
    plant(monkeypatch)
    expected = REPORTED.get(plant, "")
    reports = (campaign.judge(trial) for trial in trials)
    wrong = next((lines for lines in reports if any(expected in line for line in lines)), [])
    print(*wrong[:5], sep="\n")
    assert wrong, "no run detects the bug"
