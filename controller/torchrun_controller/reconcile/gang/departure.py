"""A gang on a machine that is about to leave: it stops while all of its machines still run.

All ranks get SIGTERM and their whole grace period, so that they can save a checkpoint together.
The next gang starts elsewhere. Without this, the machine would take some ranks with it, and the
others would lose their peers. As after a resize, the next gang is created at once, and its gate
waits for the pods of this one.
"""

from msgspec import Struct

from torchrun_api.kinds.core import Node, Pod, Taint
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.pods.nodes import (
    LEAVING_TAINTS,
    find_leaving_taint,
    tolerates,
)

MACHINE_LEAVING = "MachineLeaving"


class Departure(Struct, frozen=True):
    """Why a gang should start elsewhere, and the machine that leaves."""

    why: Reason
    machine: str


def find_departure(observed: Observed) -> Departure | None:
    """Return the first departure of a machine of the present gang.

    None if all machines stay, and for a job that tolerates the taint: its next gang could start on
    the same machine.
    """
    gang, machines = observed.gang, observed.cluster.nodes or {}
    tolerations = gang.current_job.spec.template.spec.tolerations
    for pod in gang.workers:
        machine = machines.get(pod.spec.node_name)
        taint = _taint_of(pod, machine)
        if taint is None or any(tolerates(toleration, taint) for toleration in tolerations):
            continue
        message = (
            f"Machine {pod.spec.node_name} is about to leave: {LEAVING_TAINTS[taint.key]} has set"
            f" the taint {taint.key}. All ranks get SIGTERM to save a checkpoint, and the next gang"
            " starts on other machines. Not counted by maxRestarts."
        )
        return Departure(Reason(MACHINE_LEAVING, message), pod.spec.node_name)
    return None


def _taint_of(pod: Pod, machine: Node | None) -> Taint | None:
    return find_leaving_taint(machine) if machine is not None and alive(pod) else None
