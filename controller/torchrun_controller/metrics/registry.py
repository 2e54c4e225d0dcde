"""Every metric of the controller, in a registry of its own: a new one is declared here.

Names include the unit and are stable: dashboards and alerts depend on them. Labels have few values
(outcomes, phases, verbs, resources, HTTP codes) or a bounded number (queues and reasons, see
`labels`); names of jobs are limited by --metrics-jobs. Metrics that client-go or controller-runtime
define have their names, so that their dashboards work. No label is called `job` or `namespace`:
Prometheus sets these for the scraped pod.

Counters and histograms are updated by the code that they measure, those of jobs by `changes`.
Gauges (the size of a cache, the age of a watch) call a function at each scrape. The gauges of jobs
and queues are collectors, with their own names in `jobs` and `per_job`:

    metrics = Metrics()
    queue = AsyncWorkQueue(clock, observer=QueueObserver(metrics, "job"))
    watch_queue(metrics, "job", queue)
    metrics.register(JobMetrics(metrics.queue_labels, ...))
    metrics.watch_store("pods", pods)
    metrics.watch_age("pods", lambda: clock() - informer.last_seen)
    metrics.watch_leadership(leader.may_write, lease="torchrun-system/torchrun-controller")
"""

from collections.abc import Callable, Sized
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.registry import Collector

from torchrun_api.kinds.status import TERMINAL, UNFINISHED
from torchrun_api.kinds.workspace import SYNCED_SOURCES
from torchrun_controller.cache.progress_reports import Totals
from torchrun_controller.metrics.buckets import (
    ADMISSION_BUCKETS,
    PHASE_BUCKETS,
    QUEUE_BUCKETS,
    REQUEST_BUCKETS,
    SIZE_BUCKETS,
    START_BUCKETS,
)
from torchrun_controller.metrics.labels import OTHERS, QueueLabels, Reasons
from torchrun_controller.metrics.snapshot import MetricsSnapshot

RESTART_KINDS = ("failure", "disruption", "resize", "in-place")  # of a queue


class Metrics:
    """All metrics of the process, one attribute for each; its HELP text says what to do about it.

    Public attributes are updated directly, by `labels(...)` in the order of their declaration. The
    others are set through the methods. `registry` is a new one by default. Not thread-safe: the
    event loop owns all values, and `snapshot` copies them for a thread.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # The creation times of series would double the size of the response.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry() if registry is None else registry
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._add_reconcile_metrics()
        self._add_request_metrics()
        self._add_leader_metrics()
        self._add_admission_metrics()
        self._add_progress_metrics()
        self._add_queue_metrics()
        self._add_job_metrics()
        self.queue_labels = QueueLabels()
        self.restart_reasons = Reasons()
        build = self._gauge(
            "torchrun_build_info", "1, with the controller's version as label.", "version"
        )
        build.labels(version("torchrun-controller")).set(1)

    def _add_reconcile_metrics(self) -> None:
        self.reconciles = self._counter(
            "torchrun_reconcile",
            "Reconciles by controller and outcome. Done and RequeueAfter are healthy. Behind "
            "waits for the cache to show the controller's own writes. Postponed waits for the "
            "interval of a large gang or for a Retry-After. Retry failed and is retried with "
            "back-off. Terminal was refused and waits for a change.",
            "controller",
            "outcome",
        )
        self.reconcile_seconds = self._histogram(
            "torchrun_reconcile_seconds",
            "Time of a reconcile, including its writes. If it is high but "
            "torchrun_api_request_seconds is low, the event loop is busy.",
            REQUEST_BUCKETS,
            "controller",
            "outcome",
        )
        self.reconcile_panics = self._counter(
            "torchrun_reconcile_panics",
            "Reconciles that raised an unexpected exception. Each is a bug: the log has the "
            "traceback. The key is retried with back-off.",
        )
        self.stale_sync_skips = self._counter(
            "torchrun_stale_sync_skips",
            "Reconciles postponed because the cache did not show the controller's last write yet. "
            "A constant rate means that watches lag.",
        )
        self.applies = self._counter(
            "torchrun_apply",
            "Server-side applies and deletes by resource and result.",
            "resource",
            "result",
        )

    def _add_queue_metrics(self) -> None:
        """Add the metrics of work queues under client-go's names; `name` is the controller's."""
        self.workqueue_adds = self._counter(
            "workqueue_adds", "Keys added to the work queue.", "name"
        )
        self.workqueue_retries = self._counter(
            "workqueue_retries",
            "Keys that failed and were added again with the rate limit.",
            "name",
        )
        self.workqueue_queue_seconds = self._histogram(
            "workqueue_queue_duration_seconds",
            "Time that a key waits in the work queue: about a millisecond at rest.",
            QUEUE_BUCKETS,
            "name",
        )
        self.workqueue_work_seconds = self._histogram(
            "workqueue_work_duration_seconds",
            "Time that the processing of a key takes.",
            QUEUE_BUCKETS,
            "name",
        )
        self.workqueue_depth = self._gauge(
            "workqueue_depth",
            "Keys waiting in the work queue. Growth means that reconciles do not keep up: raise "
            "--workers, or see workqueue_work_duration_seconds.",
            "name",
        )
        self.workqueue_unfinished_seconds = self._gauge(
            "workqueue_unfinished_work_seconds",
            "Total age of running reconciles in seconds. Steady growth means that workers are "
            "blocked; the slope is their number.",
            "name",
        )
        self.workqueue_longest_seconds = self._gauge(
            "workqueue_longest_running_processor_seconds",
            "Age of the longest running reconcile in seconds.",
            "name",
        )

    def _add_request_metrics(self) -> None:
        self.api_requests = self._counter(
            "torchrun_api_requests",
            "Requests to the API server by HTTP code; 0 means no answer. 403: RBAC lacks the "
            "verb. 409: a conflict with another writer. 429: the server rejects load.",
            "verb",
            "resource",
            "code",
        )
        self.api_request_seconds = self._histogram(
            "torchrun_api_request_seconds",
            "Time until the API server answers; for a watch, until the response headers.",
            REQUEST_BUCKETS,
            "verb",
            "resource",
        )
        self.watch_restarts = self._counter(
            "torchrun_watch_restarts",
            "Watches and lists that broke, by cause, without the normal ends every 5 to 10 "
            "minutes. Silent: nothing arrived for 90 s, usually because nothing changed.",
            "resource",
            "cause",
        )
        self.watch_lists = self._counter(
            "torchrun_watch_lists",
            "Full lists: one at the start, and one each time that the server no longer has the "
            "version of a watch. More than a few a day are costly.",
            "resource",
        )
        self.watch_skipped_frames = self._counter(
            "torchrun_watch_skipped_frames",
            "Events of a watch that could not be decoded. The controller keeps the previous state "
            "of that object; the log names it.",
            "resource",
        )
        self._watch_age = self._gauge(
            "torchrun_watch_age_seconds",
            "Seconds since the last byte of a watch. Bookmarks arrive about every 60 s, so more "
            "than 90 means that the watch is broken.",
            "resource",
        )
        self._store_objects = self._gauge(
            "torchrun_store_objects", "Objects in the cache.", "resource"
        )

    def _add_leader_metrics(self) -> None:
        self._leader = self._gauge(
            "torchrun_leader",
            "1 while this process is the leader, 0 on a standby. The sum over all replicas is 1, "
            "or 0 while the lease changes its holder. The label scope has its namespace, or all.",
            "lease",
            "scope",
        )
        self.lease_transitions = self._counter(
            "torchrun_lease_transitions",
            "Changes of the lease's holder. Frequent changes mean that leaders crash or cannot "
            "renew the lease in time.",
        )

    def _add_admission_metrics(self) -> None:
        self.admission_seconds = self._histogram(
            "torchrun_admission_seconds",
            "Time from the moment that a job lacks only its admission until it is admitted.",
            ADMISSION_BUCKETS,
        )
        self.preemptions = self._counter(
            "torchrun_preemptions",
            "Preempted jobs by reason: HigherPriority, or Reclaimed by a queue whose quota they "
            "borrowed.",
            "reason",
        )
        # Prometheus does not see the increase of a series that starts at 1.
        for reason in ("HigherPriority", "Reclaimed"):
            self.preemptions.labels(reason)

    def _add_job_metrics(self) -> None:
        """Add the metrics of status changes, which `changes` counts; see `add_queue`."""
        self.phase_seconds = self._histogram(
            "torchrun_phase_seconds",
            "Time that jobs spent in a phase, observed when they leave it.",
            PHASE_BUCKETS,
            "phase",
        )
        self.job_start_seconds = self._histogram(
            "torchrun_job_start_seconds",
            "Time from the creation of a TorchrunJob until it is Running for the first time. "
            "Includes queueing, workspace sync, scheduling and image pulls.",
            START_BUCKETS,
        )
        self.gang_start_seconds = self._histogram(
            "torchrun_gang_start_seconds",
            "Time from the creation of a gang's Job, or its resumption by Kueue or a user, to the "
            "phase Running: scheduling, image pulls, volumes. The label attempt is first, or "
            "later for a restart or resize.",
            START_BUCKETS,
            "attempt",
        )
        self.sync_seconds = self._histogram(
            "torchrun_sync_seconds",
            "Time from the creation of a sync pod until its workspace is ready.",
            START_BUCKETS,
            "source",
        )
        self.sync_bytes = self._histogram(
            "torchrun_sync_bytes", "Size of synced workspaces in bytes.", SIZE_BUCKETS, "source"
        )
        self.restarts = self._counter(
            "torchrun_restarts",
            "Restarts, by reason. Kind is failure (a new gang, counted by maxRestarts), disruption "
            "(a new gang, not counted), resize (a new gang), or in-place (the ranks start again "
            "in the same pods, counted by maxRestarts).",
            "kind",
            "reason",
        )
        self.queue_restarts = self._counter(
            "torchrun_queue_restarts",
            "Restarts by queue and kind: failure, disruption, resize or in-place. The first 100 "
            "queues; all others are (others).",
            "job_namespace",
            "queue",
            "kind",
        )
        self.queue_jobs_finished = self._counter(
            "torchrun_queue_jobs_finished",
            "Finished jobs by queue and phase: Succeeded, Failed or TimedOut.",
            "job_namespace",
            "queue",
            "phase",
        )
        for phase in UNFINISHED:
            self.phase_seconds.labels(phase)
        for attempt in ("first", "later"):
            self.gang_start_seconds.labels(attempt)
        for source in SYNCED_SOURCES:
            self.sync_seconds.labels(source)
            self.sync_bytes.labels(source)
        self.add_queue(("", OTHERS))

    def _add_progress_metrics(self) -> None:
        self.progress_reports = self._counter(
            "torchrun_progress_reports",
            "Progress reports by HTTP code. 204: accepted. 503: this replica is a standby, or "
            "tokens cannot be reviewed (see the log; RBAC may lack create on tokenreviews). 401, "
            "403: the sender is not a worker.",
            "code",
        )
        self._reporting_jobs = self._gauge(
            "torchrun_jobs_reporting",
            "TorchrunJobs that reported progress within the last minute. Other running jobs do "
            "not use torchrun_progress, or hang.",
        )
        self._samples_per_second = self._gauge(
            "torchrun_training_samples_per_second",
            "Total samples per second of all jobs that reported within the last minute.",
        )

    def observe_request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count a request to the API server; a transport's `Observe`.

        `code` is the HTTP code, 0 without a response; `seconds` until the response's headers.
        """
        self.api_requests.labels(verb, resource, code).inc()
        self.api_request_seconds.labels(verb, resource).observe(seconds)

    def register(self, collector: Collector) -> None:
        """Add a collector, whose `collect` is called at each scrape.

        Raises ValueError if one of its names is registered already.
        """
        self.registry.register(collector)

    def add_queue(self, queue: tuple[str, str]) -> None:
        """Create the series of a queue, by its labels, at 0.

        Prometheus does not see the increase of a series that starts at 1.
        """
        for kind in RESTART_KINDS:
            self.queue_restarts.labels(*queue, kind)
        for phase in sorted(TERMINAL):
            self.queue_jobs_finished.labels(*queue, phase)

    def remove_queue(self, queue: tuple[str, str]) -> None:
        """Drop the series of a deleted queue, by its labels."""
        labels = dict(zip(("job_namespace", "queue"), queue, strict=True))
        self.queue_restarts.remove_by_labels(labels)
        self.queue_jobs_finished.remove_by_labels(labels)

    def watch_progress(self, totals: Callable[[], Totals]) -> None:
        """Export the number of reporting jobs and the sum of their samples per second."""
        self._reporting_jobs.set_function(lambda: totals().jobs)
        self._samples_per_second.set_function(lambda: totals().samples_per_second)

    def watch_store(self, resource: str, store: Sized) -> None:
        """Export the number of objects in the cache of a resource ("jobs.batch")."""
        self._store_objects.labels(resource).set_function(lambda: len(store))

    def watch_age(self, resource: str, seconds: Callable[[], float]) -> None:
        """Export the seconds since the last byte of a resource's watch.

        Also creates the resource's series of lists and skipped frames at 0.
        """
        self._watch_age.labels(resource).set_function(seconds)
        # Prometheus does not see the increase of a series that starts at 1.
        self.watch_skipped_frames.labels(resource)
        self.watch_lists.labels(resource)

    def watch_leadership(
        self, may_write: Callable[[], bool], lease: str = "", namespace: str = ""
    ) -> None:
        """Export whether this process may write.

        `lease` is namespace/name of the Lease, "" without election. `namespace` is the one that the
        controller is limited to, "" for all.
        """
        self._leader.labels(lease, namespace or "all").set_function(lambda: float(may_write()))

    def snapshot(self) -> MetricsSnapshot:
        """Copy all values, on the event loop that owns them (4 ms for 1,300 lines)."""
        return MetricsSnapshot(tuple(self.registry.collect()))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(name, help_text, labels, registry=self.registry)

    def _histogram(
        self, name: str, help_text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(name, help_text, labels, buckets=buckets, registry=self.registry)
