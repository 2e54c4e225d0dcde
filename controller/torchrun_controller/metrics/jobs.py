"""Metrics of jobs, queues and machines: updated with each change of a cache, read at each scrape.

Only the leader exports values, so that sums over replicas are correct. GPU seconds are a counter:
they start at 0 in each process and increase while it leads.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import get_args

from msgspec import Struct
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torchrun_api.kinds.core import Node
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.quantity import QuantityError, parse
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.status import TERMINAL, UNFINISHED, WAITING, Phase
from torchrun_controller.cache.observe import Key
from torchrun_controller.cache.store import Change
from torchrun_controller.metrics.changes import phase_since
from torchrun_controller.metrics.labels import OTHERS, QueueLabels, Reasons
from torchrun_controller.reconcile.admission.model import QueueSummary
from torchrun_controller.reconcile.job import network
from torchrun_controller.reconcile.model.conditions import BLOCKED_REASONS
from torchrun_controller.reconcile.pods.nodes import ready_condition

MAX_WAITS = 200  # most series of torchrun_queue_waiting_jobs
TRANSPORTS = ("Socket", "IB", "Libfabric", OTHERS)
_QUEUE = ("job_namespace", "queue")

Label = tuple[str, str]


class _JobRecord(Struct, frozen=True, gc=False):
    """The counted values of one job.

    `since` is the start of its phase in Unix time (seconds). `networks`: nodes by transport.
    """

    queue: Key
    phase: Phase
    reason: str
    gpus: int
    unfenced: int
    since: float
    networks: tuple[tuple[str, int], ...]
    has_slow_network: bool


_by_state = attrgetter("queue", "phase", "reason", "gpus")
_by_phase = attrgetter("phase")


def _blocked_first(group: tuple[tuple[Key, Phase, str, int], int]) -> bool:
    (_, _, reason, _), _ = group
    return reason not in BLOCKED_REASONS


class _QueueRecord(Struct, frozen=True):
    """The exported values of one queue. `ready` is None without the condition Ready.

    `quota` is in GPUs, None for no quota; `resource` is the name of the GPU resource.
    """

    ready: bool | None
    reason: str
    quota: int | None
    resource: str


class JobMetrics(Collector):
    """Collects the metrics of all jobs, queues and machines.

    `leads` returns whether this process leads; `now` is Unix time in seconds; `monotonic` measures
    GPU seconds, so setting the clock does not change them. `nodes` returns the nodes, None if they
    are unknown. `add_queue` is called with the labels of an existing queue, also when it gets
    labels of its own, `remove_queue` with those of a deleted one.
    """

    def __init__(
        self,
        queues: QueueLabels,
        *,
        leads: Callable[[], bool],
        now: Callable[[], float],
        monotonic: Callable[[], float],
        nodes: Callable[[], Iterable[Node] | None],
        add_queue: Callable[[Label], None] = lambda queue: None,
        remove_queue: Callable[[Label], None] = lambda queue: None,
    ) -> None:
        self._admission: tuple[QueueSummary, ...] = ()
        self._labels = queues
        self._leads = leads
        self._now = now
        self._monotonic = monotonic
        self._nodes = nodes
        self._add_queue = add_queue
        self._remove_queue = remove_queue
        self._reasons = Reasons()
        self._jobs: dict[Key, _JobRecord] = {}
        self._queue_records: dict[Key, _QueueRecord] = {}
        # For each running job, the monotonic time until which its GPU seconds are counted.
        self._counted_until: dict[Key, float] = {}
        self._gpu_seconds: defaultdict[Label, float] = defaultdict(float)
        self._is_leader = False

    def job_changed(self, change: Change[TorchrunJob], initial: bool) -> None:
        """Record a change of a job. An informer's `on_change`."""
        meta = change.object.metadata
        key = meta.namespace, meta.name
        now = self._monotonic()
        self._update_leadership(now)
        self._count_gpus(key, now)
        record = None if change.new is None else _job_record(change.new, self._now())
        if record is None:
            self._jobs.pop(key, None)
        else:
            self._jobs[key] = record
        if record is not None and record.phase == "Running":
            self._counted_until.setdefault(key, now)
        else:
            self._counted_until.pop(key, None)

    def queue_changed(self, change: Change[TorchrunQueue], initial: bool) -> None:
        """Record a change of a queue. An informer's `on_change`."""
        meta = change.object.metadata
        key = meta.namespace, meta.name
        if change.new is not None:
            self._labels.add(key)
            self._add_queue(self._labels.of(key))
            self._queue_records[key] = _queue_record(change.new)
            return
        label = self._labels.of(key)
        self._queue_records.pop(key, None)
        promoted_labels = self._labels.discard(key)
        if label[1] != OTHERS:
            self._gpu_seconds.pop(label, None)
            self._remove_queue(label)
        for promoted_label in promoted_labels:
            self._add_queue(promoted_label)

    def set_admission(self, queues: tuple[QueueSummary, ...]) -> None:
        """Set the coordinator's summaries of the queues, for the next scrapes."""
        self._admission = queues

    def describe(self) -> Iterator[Metric]:
        """Return the families without values, so that the registration does not collect."""
        yield from _Families().all()

    def collect(self) -> Iterator[Metric]:
        """Return all values if this process leads, else the families without values."""
        families, now = _Families(), self._monotonic()
        self._update_leadership(now)
        if self._is_leader:
            for key in self._counted_until:
                self._count_gpus(key, now)
            self._add_jobs(families, self._now())
            self._add_queues(families)
            self._add_nodes(families)
        yield from families.all()

    def _update_leadership(self, now: float) -> None:
        """Count GPU seconds from `now` on if this process has become the leader."""
        was_leader, self._is_leader = self._is_leader, self._leads()
        if self._is_leader and not was_leader:
            self._counted_until = dict.fromkeys(self._counted_until, now)

    def _count_gpus(self, key: Key, now: float) -> None:
        """Count the GPU seconds of a running job up to `now`."""
        since = self._counted_until.get(key)
        if since is None:
            return
        self._counted_until[key] = now
        if self._is_leader:
            record = self._jobs[key]
            self._gpu_seconds[self._labels.of(record.queue)] += record.gpus * (now - since)

    def _add_jobs(self, families: "_Families", now: float) -> None:
        phases = Counter(map(_by_phase, self._jobs.values()))
        for phase in get_args(Phase):
            families.jobs.add_metric((phase,), phases[phase])
        oldest: dict[str, float] = dict.fromkeys(WAITING, now)
        for record in self._jobs.values():
            if record.phase in oldest and record.since < oldest[record.phase]:
                oldest[record.phase] = record.since
        for phase in WAITING:
            families.oldest.add_metric((phase,), now - oldest[phase])
        networks: Counter[str] = Counter()
        for record in self._jobs.values():
            for transport, nodes in record.networks:
                networks[transport] += nodes
        for transport in TRANSPORTS:
            families.networks.add_metric((transport,), networks[transport])
        slow_jobs = sum(record.has_slow_network for record in self._jobs.values())
        families.slow_networks.add_metric((), slow_jobs)
        families.unfenced.add_metric((), sum(record.unfenced for record in self._jobs.values()))

    def _add_queues(self, families: "_Families") -> None:
        labels = {key: self._labels.of(key) for key in self._queue_records}
        phases: Counter[tuple[Label, Phase]] = Counter()
        waits: Counter[tuple[Label, str]] = Counter()
        gpus: Counter[tuple[Label, str]] = Counter()
        # Equal jobs are counted first: Counter runs in C.
        groups = Counter(map(_by_state, self._jobs.values()))
        # The number of waits is limited: the reasons of alerts come first.
        for (queue, phase, reason, size), count in sorted(groups.items(), key=_blocked_first):
            label = labels.get(queue) or self._labels.of(queue)
            phases[label, phase] += count
            if phase == "Running":
                gpus[label, "running"] += size * count
            elif phase in WAITING:
                gpus[label, "waiting"] += size * count
                waits[self._wait_series(waits, label, reason)] += count
        for label in {*labels.values(), *(label for label, _ in phases)}:
            for phase in UNFINISHED:
                families.queue_jobs.add_metric((*label, phase), phases[label, phase])
            for state in ("running", "waiting"):
                families.queue_gpus.add_metric((*label, state), gpus[label, state])
            families.gpu_seconds.add_metric(label, self._gpu_seconds[label])
        for (label, reason), count in waits.items():
            families.waits.add_metric((*label, reason), count)
        self._add_templates(families, labels)

    def _wait_series(
        self, waits: Counter[tuple[Label, str]], label: Label, reason: str
    ) -> tuple[Label, str]:
        series = label, self._reasons.of(reason)
        return series if series in waits or len(waits) < MAX_WAITS else (label, OTHERS)

    def _add_templates(self, families: "_Families", labels: dict[Key, Label]) -> None:
        for key, record in self._queue_records.items():
            if labels[key][1] == OTHERS:
                continue
            if record.ready is not None:
                reason = self._reasons.of(record.reason)
                families.ready.add_metric((*labels[key], reason), float(record.ready))
            if record.quota is not None:
                families.queue_gpus.add_metric((*labels[key], "quota"), record.quota)
        for summary in self._admission:
            label = labels.get((summary.namespace, summary.name))
            if label is not None and label[1] != OTHERS:
                families.queue_gpus.add_metric((*label, "admitted"), summary.used.gpus)

    def _add_nodes(self, families: "_Families") -> None:
        nodes = self._nodes()
        if nodes is None:
            return
        resources = {record.resource for record in self._queue_records.values()}
        usable_nodes = (node for node in nodes if _is_usable(node))
        families.nodes.add_metric((), sum(_gpus(node, resources) for node in usable_nodes))


class _Families:
    """Name, HELP and labels of each family."""

    def __init__(self) -> None:
        self.jobs = GaugeMetricFamily(
            "torchrun_jobs",
            "TorchrunJobs by phase, exported by the leader.",
            labels=("phase",),
        )
        self.oldest = GaugeMetricFamily(
            "torchrun_jobs_oldest_seconds",
            "Age of the oldest job in each waiting phase; 0 if there is none.",
            labels=("phase",),
        )
        self.queue_jobs = GaugeMetricFamily(
            "torchrun_queue_jobs",
            "Unfinished TorchrunJobs by queue and phase. The first 100 queues; all others are "
            "(others).",
            labels=(*_QUEUE, "phase"),
        )
        self.waits = GaugeMetricFamily(
            "torchrun_queue_waiting_jobs",
            "Jobs that are Pending, Syncing, Queued or Preempted, by queue and reason. See "
            "docs/troubleshooting.md.",
            labels=(*_QUEUE, "reason"),
        )
        self.queue_gpus = GaugeMetricFamily(
            "torchrun_queue_gpus",
            "GPUs by queue and state: running, waiting, admitted, and quota.",
            labels=(*_QUEUE, "state"),
        )
        self.gpu_seconds = CounterMetricFamily(
            "torchrun_queue_gpu_seconds",
            "GPU seconds of running jobs by queue. Only the leader counts: sum increase() over "
            "all replicas.",
            labels=_QUEUE,
        )
        self.ready = GaugeMetricFamily(
            "torchrun_queue_ready",
            "1 if a queue's condition Ready is True, else 0 with its reason.",
            labels=(*_QUEUE, "reason"),
        )
        self.unfenced = GaugeMetricFamily(
            "torchrun_unfenced_workers",
            "Workers on lost machines that may still run and write checkpoints. Their jobs wait "
            "until the machine is back or is confirmed to be off.",
        )
        self.networks = GaugeMetricFamily(
            "torchrun_network_nodes",
            "Nodes of running jobs by the network that NCCL uses: Socket (TCP), IB (InfiniBand or "
            "RoCE), Libfabric, or (others). Nodes whose NCCL has not connected yet, or whose job "
            "sets NCCL_DEBUG, are not counted.",
            labels=("transport",),
        )
        self.slow_networks = GaugeMetricFamily(
            "torchrun_slow_network_jobs",
            "Running jobs with the condition SlowNetwork: their nodes use different networks, or "
            "TCP although the pods request a faster device.",
        )
        self.nodes = GaugeMetricFamily(
            "torchrun_node_gpus",
            "GPUs of ready, schedulable machines, also if other workloads use them. Absent if the "
            "controller may not read Nodes.",
        )

    def all(self) -> Iterator[Metric]:
        """Iterate over the families."""
        yield from vars(self).values()


def _job_record(job: TorchrunJob, now: float) -> _JobRecord:
    status, since = job.status, phase_since(job)
    return _JobRecord(
        queue=(job.metadata.namespace, job.spec.job_queue),
        phase=status.phase or "Pending",
        reason=status.reason,
        gpus=status.gpus or 0,
        unfenced=0 if status.phase in TERMINAL else len(status.unfenced),
        since=since.timestamp() if since is not None else now,
        networks=tuple((_transport(use.transport), use.nodes) for use in status.network)
        if status.phase == "Running"
        else (),
        has_slow_network=status.phase == "Running"
        and any(condition.type == network.CONDITION for condition in status.conditions),
    )


def _transport(name: str) -> str:
    """The label of a network: plugins have names and versions of their own."""
    return next((each for each in TRANSPORTS if each in name), OTHERS)


def _queue_record(queue: TorchrunQueue) -> _QueueRecord:
    ready = next((c for c in queue.status.conditions if c.type == "Ready"), None)
    quota = queue.spec.quota
    return _QueueRecord(
        ready=None if ready is None else ready.status == "True",
        reason="" if ready is None else ready.reason,
        quota=None if quota is None else quota.gpus,
        resource=queue.spec.node_resources.gpu_resource_name,
    )


def _is_usable(node: Node) -> bool:
    ready = ready_condition(node)
    return ready is not None and ready.status == "True" and not node.spec.unschedulable


def _gpus(node: Node, resources: Iterable[str]) -> int:
    return sum(_whole(node.status.allocatable.get(resource, "0")) for resource in resources)


def _whole(quantity: str) -> int:
    if quantity.isdecimal():
        return int(quantity)
    try:
        return int(parse(quantity))
    except QuantityError:
        return 0
