"""No gang scheduler: each pod is placed by itself, and the start gate waits for the last."""

from torchrun_controller.reconcile.schedulers.affinity import near_each_other
from torchrun_controller.reconcile.schedulers.binding import Binding, Gang


def bind(gang: Gang) -> Binding:
    """Topology is pod affinity; no group."""
    return Binding(template=near_each_other(gang.template, gang.labels, gang.topology))
