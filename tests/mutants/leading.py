"""Bugs by which two leaders write, or one promises the same room twice: admission and the lease."""

from mutants.mutant import Mutant

ADMISSION = tuple(
    f"tests/unit/controllers/test_{name}.py" for name in ("admission", "admission_refusals")
)
LEADER = ("tests/unit/leader",)

LEADING = (
    Mutant(
        "room-is-promised-twice",
        "controllers/admission.py",
        "if self._unconfirmed:\n            return Behind(BEHIND_RETRY)",
        "",
        "two jobs are admitted for the same nodes",
        ADMISSION,
    ),
    Mutant(
        "admission-takes-the-status-over",
        "controllers/admission.py",
        'FIELD_MANAGER = "torchrun-controller-admission"',
        'FIELD_MANAGER = "torchrun-controller-status"',
        "each decision wipes the rest of the status, and the status wipes the decision",
        ADMISSION,
    ),
    Mutant(
        "a-refusal-stops-every-queue",
        "controllers/admission.py",
        "batch = [u for u in batch if delayed.isdisjoint(_cohorts_of(u, cohorts))]",
        "batch = []",
        "no queue admits a job while the status of one job is refused",
        ADMISSION,
    ),
    Mutant(
        "a-refusal-delays-nothing",
        "controllers/admission.py",
        "refusals.append(error)\n                    delayed |= _cohorts_of(update, cohorts)",
        "refusals.append(error)",
        "a job is admitted for quota whose release was refused",
        ADMISSION,
    ),
    Mutant(
        "a-withheld-release-delays-nothing",
        "controllers/admission.py",
        "if update.owner.metadata.uid in withheld and stage <= Stage.ADMIT:",
        "if update.owner.metadata.uid in withheld and stage > Stage.ADMIT:",
        "a job is admitted for quota whose release waits for its next try",
        ADMISSION,
    ),
    Mutant(
        "a-lease-is-taken-early",
        "leader/election.py",
        "return self._changed_at + (",
        "return self._changed_at + 0 * (",
        "two leaders at once",
        LEADER,
    ),
    Mutant(
        "writes-go-on-to-the-end",
        "leader/election.py",
        "return self._renewed_at + self.durations.renew_deadline\n\n    def unsure",
        "return self._renewed_at + self.durations.lease\n\n    def unsure",
        "a write of the old leader arrives in the time of the new one",
        LEADER,
    ),
    Mutant(
        "renewals-count-from-their-answer",
        "leader/election.py",
        "self._renewed_at = sent_at\n",
        "self._renewed_at = now\n",
        "behind a slow network two leaders at once",
        LEADER,
    ),
    Mutant(
        "a-lost-lease-is-not-noticed",
        "leader/election.py",
        "if self.holder != self.identity:\n                return LeaseLost",
        "if not self.holder:\n                return LeaseLost",
        "the process goes on without the right to write, and nobody starts it again",
        LEADER,
    ),
    Mutant(
        "the-lease-is-taken-unseen",
        "leader/elector.py",
        '{"metadata": {"resourceVersion": version}, "spec": spec}',
        '{"metadata": {}, "spec": spec}',
        "two standbys take the lease in the same moment",
        LEADER,
    ),
    Mutant(
        "a-deleted-lease-is-a-release",
        "leader/election.py",
        "self._version, self._present, self._current = version, False, True",
        "self._version, self._present, self._record = version, False, LeaseSpec(); self._current = True",
        "who deletes the lease gets two leaders",
        LEADER,
    ),
)
