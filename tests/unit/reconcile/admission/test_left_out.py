"""Decisions without jobs whose status cannot be written."""

from msgspec.structs import replace

from queueing import NOW, admitted, admitted_workload, queue, request
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.inputs import leave_out
from torchrun_controller.reconcile.admission.model import ClusterState, Workload


def state(*workloads: Workload) -> ClusterState:
    return ClusterState(queues=(queue("a", quota={"nodes": 3}),), workloads=workloads)


def test_no_uid_changes_nothing():
    whole = state(request("j", "a"))
    assert leave_out(whole, frozenset()) is whole


def test_a_job_that_waits_uses_no_turn_and_no_room():
    whole = state(request("stuck", "a", 3, age=9), request("j", "a", 3))
    assert admitted(admit(whole, NOW)) == ["stuck"]
    assert admitted(admit(leave_out(whole, {"stuck"}), NOW)) == ["j"]


def test_an_admitted_job_keeps_its_charge_and_its_size():
    stuck = admitted_workload("stuck", "a", 2)
    for nodes in (1, 2, 3):
        whole = state(replace(stuck, nodes=nodes), request("large", "a", 2), request("j", "a"))
        decisions = admit(leave_out(whole, {"stuck"}), NOW)
        assert admitted(decisions) == ["j"], "it neither grows nor shrinks"
        assert decisions.queues[0].used.nodes == 3
