"""The dashboard of operators: health of the controller."""

from panels import Panel, Row, dashboard, tile

SINCE = "[$__rate_interval]"


def rate(metric: str, by: str = "", only: str = "") -> str:
    """The rate of a counter, summed over all replicas that `only` selects."""
    each = f"rate({metric}{SINCE}){only}"
    return f"sum by ({by}) ({each})" if by else f"sum({each})"


def quantile(part: float, histogram: str, by: str = "", only: str = "") -> str:
    """A quantile of a histogram over all replicas."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({part}, sum by ({labels}) (rate({histogram}_bucket{SINCE}){only}))"


def share(metric: str, selected: str, among: str = "") -> str:
    """The share of a counter's rate that a selector matches; 0 if it matches nothing.

    among: a selector of the whole.
    """
    whole = metric + (f"{{{among}}}" if among else "")
    return f"({rate(metric + '{' + selected + '}')} or vector(0)) / {rate(whole)}"


HEALTH = Row(
    "Health",
    (
        tile(
            "Leaders",
            "Leaders per lease. Must be 1. With 0, no job starts. With more, replicas "
            "overwrite each other's objects.",
            "sum(torchrun_leader)",
            red_below=1,
        ),
        Panel(
            "Replicas",
            "Scraped controllers by version.",
            (("count by (version) (torchrun_build_info)", "{{version}}"),),
            kind="stat", width=4, height=4,
        ),
        tile(
            "Oldest watch",
            "The API server sends a bookmark about every 60 s. Above 90 s a watch is "
            "dead. Above 180 s an alert fires.",
            "max(torchrun_watch_age_seconds)",
            unit="s", red_above=180,
        ),
        tile(
            "Failed reconciles",
            "Share of reconciles that end in Retry. The log has the reason of each.",
            share('torchrun_reconcile_total', 'outcome="Retry"', 'outcome!="Postponed"'),
            unit="percentunit", red_above=0.2,
        ),
        tile(
            "Failed requests",
            "Share of requests without a response (code 0) or with a 5xx response.",
            share('torchrun_api_requests_total', 'code=~"0|5.."'),
            unit="percentunit", red_above=0.1,
        ),
        Panel(
            "Uptime",
            "Time since the start of each process. Repeated restarts mean crashes or lost leases.",
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
            "Done and RequeueAfter are healthy. Behind waits for the cache, Postponed for an "
            "interval or a Retry-After. Retry failed, Terminal waits for the user.",
            ((rate("torchrun_reconcile_total", "controller, outcome"),
              "{{controller}} {{outcome}}"),),
            unit="ops",
        ),
        Panel(
            "Duration",
            "Time from taking a key to its outcome, including writes.",
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

# Other controllers use the same names of metrics.
OWN = " and on (instance) torchrun_build_info"
LEADS = "torchrun_leader == 1"  # the work queue of a standby grows, because it takes no keys

QUEUES = Row(
    "Work queues",
    (
        Panel(
            "Depth",
            "Keys in the leader's work queue. Growth means that the reconcilers cannot keep up.",
            ((f"max by (name) (workqueue_depth and on (instance) {LEADS})", "{{name}}"),),
        ),
        Panel(
            "Time in the work queue",
            "Time that a key waits in the queue.",
            ((quantile(0.5, "workqueue_queue_duration_seconds", "name", OWN), "{{name}} p50"),
             (quantile(0.99, "workqueue_queue_duration_seconds", "name", OWN), "{{name}} p99")),
            unit="s",
        ),
        Panel(
            "Time for each key",
            "Time to process a key.",
            ((quantile(0.99, "workqueue_work_duration_seconds", "name", OWN), "{{name}} p99"),),
            unit="s",
        ),
        Panel(
            "Adds and retries",
            "Rate-limited adds after a failure.",
            ((rate("workqueue_adds_total", "name", OWN), "{{name}} adds"),
             (rate("workqueue_retries_total", "name", OWN), "{{name}} retries")),
            unit="ops",
        ),
        Panel(
            "Longest reconcile",
            "Age of the longest running reconcile. Minutes mean that a reconcile hangs.",
            ((f"max by (name) (workqueue_longest_running_processor_seconds{OWN})", "{{name}}"),),
            unit="s",
        ),
        Panel(
            "Unfinished work",
            "Seconds that all keys in work have taken so far; the slope is the number of workers "
            "that hang.",
            ((f"sum by (name) (workqueue_unfinished_work_seconds{OWN})", "{{name}}"),),
            unit="s",
        ),
    ),
)  # fmt: skip

API = Row(
    "API server",
    (
        Panel(
            "Requests",
            "Requests by verb and resource. An idle controller renews its lease and its watches.",
            ((rate("torchrun_api_requests_total", "verb, resource"), "{{verb}} {{resource}}"),),
            unit="reqps",
        ),
        Panel(
            "Non-2xx responses",
            "403: RBAC or a quota. 409: somebody else was first. 429: the server sheds load. 0: no "
            "answer.",
            ((rate('torchrun_api_requests_total{code!~"2.."}', "code, resource"),
              "{{code}} {{resource}}"),),
            unit="reqps",
        ),
        Panel(
            "Latency",
            "Time to the response, or to its headers for a watch.",
            ((quantile(0.99, "torchrun_api_request_seconds", "verb"), "{{verb}} p99"),),
            unit="s",
        ),
        Panel(
            "Writes by result",
            "Server-side applies and deletes. Superseded: the object changed before the write.",
            ((rate("torchrun_apply_total", "resource, result"), "{{resource}} {{result}}"),),
            unit="ops",
        ),
        Panel(
            "Progress reports",
            "Progress reports of pods by response code. 204: accepted. 503: sent to a "
            "standby replica.",
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
            "Failed watches by cause.",
            ((rate("torchrun_watch_restarts_total", "resource, cause"), "{{resource}} {{cause}}"),),
            unit="ops",
        ),
        Panel(
            "Full lists",
            "Lists in the last hour. Each process lists once at its start and rarely later.",
            (("sum by (resource) (increase(torchrun_watch_lists_total[1h]))", "{{resource}}"),),
        ),
        Panel(
            "Objects in the cache",
            "Objects by resource, from the largest replica.",
            (("max by (resource) (torchrun_store_objects)", "{{resource}}"),),
        ),
        Panel(
            "Undecodable frames",
            "Objects that the controller cannot decode. It does not see their latest state.",
            (("sum by (resource) (increase(torchrun_watch_skipped_frames_total[1h]))",
              "{{resource}}"),),
        ),
    ),
)  # fmt: skip

PROCESS = Row(
    "Lease and process",
    (
        Panel(
            "Leader",
            "1 for the replica that may write.",
            (("torchrun_leader", "{{instance}} {{lease}}"),),
        ),
        Panel(
            "Changes of the lease",
            "Lease transitions in the last hour, as each replica sees them.",
            (("increase(torchrun_lease_transitions_total[1h])", "{{instance}}"),),
        ),
        Panel(
            "Memory",
            "Resident memory. The kernel kills the process at the limit of the Deployment.",
            (("process_resident_memory_bytes * on (instance) group_left () torchrun_build_info",
              "{{instance}}"),),
            unit="bytes",
        ),
        Panel(
            "CPU",
            "CPU cores. The event loop is one thread. Near 1 core, all work is delayed.",
            ((f"rate(process_cpu_seconds_total{SINCE}) * on (instance) group_left ()"
              " torchrun_build_info", "{{instance}}"),),
        ),
        Panel(
            "Open files",
            "Open file descriptors, including sockets of watches.",
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
