"""Random histories of a gang whose head has a Job of its own."""

import copy

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition

from profiles import examples
from torchrun_api import names
from torchrun_api.kinds.status import TERMINAL
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive, delete_job
from unit.reconcile.test_invariants import Histories, happens
from world import ZIP, make_job


class Heads(Histories):
    """A gang of two Jobs. Either of them can exist without the other."""

    user_scales = None  # a gang with a head has one size

    @initialize(nodes=st.integers(2, 3), zipped=st.booleans(), max_restarts=st.integers(0, 2))
    def submit(self, nodes, zipped, max_restarts):
        super().submit(nodes, zipped, True, False, max_restarts)
        self.world.job = make_job(
            numNodes=nodes,
            head={},
            reliability={"maxRestarts": max_restarts, "activeDeadlineSeconds": 7200},
            **({"volumes": ZIP} if zipped else {}),
        )

    @precondition(lambda self: self.world.observed().gang.worker_jobs)
    @happens()
    def workers_job_is_deleted(self):
        observed = self.world.observed()
        if observed.gang.child_jobs:
            self.forget_unrecorded(observed)
        self.world._delete(delete_job(observed.gang.worker_jobs[-1]))
        self.user_changes += 1

    @precondition(lambda self: self.world.workers())
    @happens()
    def head_succeeds(self):
        head = self.world.workers()[0]
        if head.metadata.labels.role == names.HEAD and alive(head):
            self.world.pod(head.metadata.name, phase="Succeeded")
            self.world.job_condition("Complete")

    @invariant()
    def half_a_gang_does_not_run(self):
        world = copy.deepcopy(self.world)
        world.settle()
        gang = world.observed().gang
        assert not head_and_workers.find_headless_jobs(gang)
        running = [p for p in gang.workers if alive(p) and p.metadata.deletion_timestamp is None]
        assert not running or world.phase in TERMINAL or head_and_workers.is_whole(gang)


Heads.TestCase.settings = examples(20, stateful_step_count=40, report_multiple_bugs=False)
TestHeads = Heads.TestCase
