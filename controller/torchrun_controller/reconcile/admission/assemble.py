"""The State of a decision, put together from what is known of jobs, queues and nodes."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import core
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.admission import machines
from torchrun_controller.reconcile.admission.accounts import queue_of
from torchrun_controller.reconcile.admission.standing import Standing
from torchrun_controller.reconcile.admission.state import Request, State
from torchrun_controller.reconcile.model.times import seconds_run
from torchrun_controller.reconcile.spec.admission_status import takes_part


class Entry(Struct, frozen=True):
    """A job and what it is to the coordinator."""

    job: TorchrunJob
    standing: Standing


def assemble(
    queues: Iterable[TorchrunQueue],
    entries: Iterable[Entry],
    orphans: Iterable[Request],
    nodes: tuple[core.Node, ...] | None,
    now: datetime,
    cohort_namespaces: frozenset[str] = frozenset(),
    overhead: Mapping[str, int] = machines.NOTHING,
) -> State:
    """`orphans` run, though their job is gone; `nodes` is None where nothing is known of them.

    Queues of `cohort_namespaces` may be of one cohort, whatever their namespace. `overhead` is what
    pods of others take of each node.
    """
    taints = machines.tolerable(nodes or ())
    kept_from = _Avoided(taints)
    return State(
        nodes=None
        if nodes is None
        else tuple(machines.machine(node, taints, overhead) for node in nodes),
        queues=tuple(queue_of(queue) for queue in queues if takes_part(queue.spec)),
        requests=(*orphans, *_requests(entries, kept_from, now)),
        cohort_namespaces=tuple(sorted(cohort_namespaces)),
    )


def _requests(entries: Iterable[Entry], kept_from: "_Avoided", now: datetime) -> Iterable[Request]:
    for entry in entries:
        request, standing = entry.standing.request, entry.standing
        if request is None:
            continue
        marks = kept_from.by(standing.tolerations, request.pod)
        if marks:
            request = replace(request, node_selector=request.node_selector | marks)
        if standing.deadline is not None:
            left = standing.deadline.total_seconds() - seconds_run(entry.job.status, now)
            request = replace(request, seconds_left=max(left, 0.0))
        yield request


class _Avoided:
    """What jobs ask of labels for the sake of taints: most of them the same."""

    def __init__(self, taints: frozenset[core.Taint]) -> None:
        self._taints = taints
        self._known: dict[object, dict[str, str]] = {}

    def by(self, tolerations: tuple[JsonObject, ...], pod: dict[str, int]) -> dict[str, str]:
        """Of a job with these tolerations whose pods request this."""
        if not self._taints:
            return {}
        key = str(tolerations), tuple(pod)
        if key not in self._known:
            self._known[key] = machines.avoided(self._taints, tolerations, pod)
        return self._known[key]
