"""Is the controller healthy?"""

from panels import Panel, Row, dashboard, tile

SINCE = "[$__rate_interval]"


def rate(metric: str, by: str = "") -> str:
    """Of a counter, summed up over replicas."""
    return f"sum by ({by}) (rate({metric}{SINCE}))" if by else f"sum(rate({metric}{SINCE}))"


def quantile(part: float, histogram: str, by: str = "") -> str:
    """Of a histogram, over replicas."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({part}, sum by ({labels}) (rate({histogram}_bucket{SINCE})))"


def share(metric: str, selected: str) -> str:
    """The part of a counter's rate that a selector picks; 0 where it picks nothing."""
    return f"({rate(metric + '{' + selected + '}')} or vector(0)) / {rate(metric)}"


HEALTH = Row(
    "Health",
    (
        tile(
            "Leaders",
            "Exactly one for each lease. None: nothing starts. Several: they fight over objects.",
            "sum(torchrun_leader)",
            red_below=1,
        ),
        Panel(
            "Replicas",
            "Controllers that are scraped, by version.",
            (("count by (version) (torchrun_build_info)", "{{version}}"),),
            kind="stat", width=4, height=4,
        ),
        tile(
            "Oldest watch",
            "Bookmarks come about every 60 s: from 90 s on a watch is dead, from 180 s an alert.",
            "max(torchrun_watch_age_seconds)",
            unit="s", red_above=180,
        ),
        tile(
            "Reconciles that fail",
            "Share of outcomes that are Retry. The log says why, for each.",
            share('torchrun_reconcile_total', 'outcome="Retry"'),
            unit="percentunit", red_above=0.2,
        ),
        tile(
            "Requests that fail",
            "Share of requests that got no answer (code 0) or a 5xx.",
            share('torchrun_api_requests_total', 'code=~"0|5.."'),
            unit="percentunit", red_above=0.1,
        ),
        Panel(
            "Up for",
            "Time since each process began. Restarts in a row are crashes or lost leases.",
            (("time() - process_start_time_seconds * on (instance) group_left ()"
              " torchrun_build_info", "{{instance}}"),),
            unit="s", kind="stat", width=4, height=4,
        ),
    ),
)  # fmt: skip

RECONCILES = Row(
    "Reconciles",
    (
        Panel(
            "Outcomes",
            "Done and RequeueAfter are healthy. Behind waits for the cache, Retry failed, Terminal "
            "waits for the user.",
            ((rate("torchrun_reconcile_total", "controller, outcome"),
              "{{controller}} {{outcome}}"),),
            unit="ops",
        ),
        Panel(
            "Duration",
            "From taking a key to its outcome, writes included.",
            ((quantile(0.5, "torchrun_reconcile_seconds", "controller"), "{{controller}} p50"),
             (quantile(0.99, "torchrun_reconcile_seconds", "controller"), "{{controller}} p99")),
            unit="s",
        ),
        Panel(
            "Bugs and stale caches",
            "Panics are bugs of the controller. Skips wait for our own last write to be seen; a "
            "steady rate means that watches lag.",
            ((rate("torchrun_reconcile_panics_total"), "panics"),
             (rate("torchrun_stale_sync_skips_total"), "stale skips")),
            unit="ops",
        ),
    ),
)  # fmt: skip

QUEUES = Row(
    "Work queues",
    (
        Panel(
            "Depth",
            "Keys that wait. Growth: workers do not keep up.",
            (("max by (name) (workqueue_depth)", "{{name}}"),),
        ),
        Panel(
            "Wait in the queue",
            "How long a key waits before it is taken.",
            ((quantile(0.5, "workqueue_queue_duration_seconds", "name"), "{{name}} p50"),
             (quantile(0.99, "workqueue_queue_duration_seconds", "name"), "{{name}} p99")),
            unit="s",
        ),
        Panel(
            "Work on a key",
            "How long the processing of a key takes.",
            ((quantile(0.99, "workqueue_work_duration_seconds", "name"), "{{name}} p99"),),
            unit="s",
        ),
        Panel(
            "Adds and retries",
            "Retries are adds with the rate limit, after a failure.",
            ((rate("workqueue_adds_total", "name"), "{{name}} adds"),
             (rate("workqueue_retries_total", "name"), "{{name}} retries")),
            unit="ops",
        ),
        Panel(
            "Longest in work",
            "How long the longest running reconcile has taken so far. Minutes: a worker hangs.",
            (("max by (name) (workqueue_longest_running_processor_seconds)", "{{name}}"),),
            unit="s",
        ),
        Panel(
            "Unfinished work",
            "Seconds that all keys in work have taken so far; the slope is the number of workers "
            "that hang.",
            (("sum by (name) (workqueue_unfinished_work_seconds)", "{{name}}"),),
            unit="s",
        ),
    ),
)  # fmt: skip

API = Row(
    "API server",
    (
        Panel(
            "Requests",
            "By verb and resource. At rest there are the lease, and watches that are renewed.",
            ((rate("torchrun_api_requests_total", "verb, resource"), "{{verb}} {{resource}}"),),
            unit="reqps",
        ),
        Panel(
            "Answers other than 2xx",
            "403: RBAC or a quota. 409: somebody else was first. 429: the server sheds load. 0: no "
            "answer.",
            ((rate('torchrun_api_requests_total{code!~"2.."}', "code, resource"),
              "{{code}} {{resource}}"),),
            unit="reqps",
        ),
        Panel(
            "Latency",
            "Until the answer; of a watch, until its headers.",
            ((quantile(0.99, "torchrun_api_request_seconds", "verb"), "{{verb}} p99"),),
            unit="s",
        ),
        Panel(
            "Writes by result",
            "Server-side applies and deletes. Superseded: the object had changed meanwhile.",
            ((rate("torchrun_apply_total", "resource, result"), "{{resource}} {{result}}"),),
            unit="ops",
        ),
        Panel(
            "Progress reports",
            "Of workers, by the code of the answer: 204 is taken, 503 comes from standbys.",
            ((rate("torchrun_progress_reports_total", "code"), "{{code}}"),),
            unit="reqps",
        ),
    ),
)  # fmt: skip

WATCHES = Row(
    "Watches and caches",
    (
        Panel(
            "Age",
            "Seconds since the last byte of each watch.",
            (("max by (resource) (torchrun_watch_age_seconds)", "{{resource}}"),),
            unit="s",
        ),
        Panel(
            "Interruptions",
            "Watches that broke, by cause.",
            ((rate("torchrun_watch_restarts_total", "resource, cause"), "{{resource}} {{cause}}"),),
            unit="ops",
        ),
        Panel(
            "Whole lists",
            "Lists taken in the last hour: one at the start of each process, few later.",
            (("sum by (resource) (increase(torchrun_watch_lists_total[1h]))", "{{resource}}"),),
        ),
        Panel(
            "Objects in the cache",
            "By resource; the largest replica.",
            (("max by (resource) (torchrun_store_objects)", "{{resource}}"),),
        ),
        Panel(
            "Frames that cannot be decoded",
            "Each is an object whose newest state the controller does not see.",
            (("sum by (resource) (increase(torchrun_watch_skipped_frames_total[1h]))",
              "{{resource}}"),),
        ),
    ),
)  # fmt: skip

PROCESS = Row(
    "Lease and process",
    (
        Panel(
            "Who leads",
            "1 for the replica that may write.",
            (("torchrun_leader", "{{instance}} {{lease}}"),),
        ),
        Panel(
            "Changes of the lease",
            "As seen by each replica, within the last hour.",
            (("increase(torchrun_lease_transitions_total[1h])", "{{instance}}"),),
        ),
        Panel(
            "Memory",
            "Resident. The Deployment's limit ends the process.",
            (("process_resident_memory_bytes * on (instance) group_left () torchrun_build_info",
              "{{instance}}"),),
            unit="bytes",
        ),
        Panel(
            "CPU",
            "Cores. The event loop is one thread: near 1, everything is late.",
            ((f"rate(process_cpu_seconds_total{SINCE}) * on (instance) group_left ()"
              " torchrun_build_info", "{{instance}}"),),
        ),
        Panel(
            "Open files",
            "Sockets of watches are among them.",
            (("process_open_fds * on (instance) group_left () torchrun_build_info",
              "{{instance}}"),),
        ),
    ),
)  # fmt: skip

VIEW = dashboard(
    "torchrun-operator",
    "Torchrun / Controller",
    "Is the controller healthy? What each alert means: docs/runbooks.md",
    (),
    (HEALTH, RECONCILES, QUEUES, API, WATCHES, PROCESS),
)
