"""The dashboard of a team: running jobs, waiting jobs with reasons, and usage."""

from operator_view import quantile, rate
from panels import Panel, Row, Variable, dashboard, tile

Q = '{job_namespace=~"$namespace", queue=~"$queue"}'


def of(metric: str, *matchers: str, **labels: str) -> str:
    """A metric of the chosen queues; `matchers` are for other operators than =."""
    equal = (f'{name}="{value}"' for name, value in labels.items())
    return metric + ", ".join((Q[:-1], *matchers, *equal)) + "}"


# A resize of an elastic job is not a problem.
RESTARTS = of("torchrun_queue_restarts_total", 'kind!="resize"')


NOW = Row(
    "Now",
    (
        tile(
            "Running jobs",
            "Jobs in phase Running. All of their pods have started.",
            f"sum({of('torchrun_queue_jobs', phase='Running')})",
        ),
        tile(
            "Waiting jobs",
            "Jobs in phase Pending, Syncing, Queued or Preempted.",
            f"sum({of('torchrun_queue_waiting_jobs')}) or vector(0)",
            yellow_above=1,
        ),
        tile(
            "GPUs in use",
            "GPUs of running jobs.",
            f"sum({of('torchrun_queue_gpus', state='running')})",
        ),
        tile(
            "Requested GPUs",
            "GPUs that waiting jobs request.",
            f"sum({of('torchrun_queue_gpus', state='waiting')})",
        ),
        tile(
            "GPU-hours",
            "GPU hours of running jobs in the selected time range.",
            f"sum(increase({of('torchrun_queue_gpu_seconds_total')}[$__range])) / 3600",
            unit="h", instant=True,
        ),
        tile(
            "Restarts",
            "Restarts after failures and disruptions in the selected time range.",
            f"sum(increase({RESTARTS}[$__range])) or vector(0)",
            instant=True, yellow_above=1, red_above=10,
        ),
    ),
)  # fmt: skip

JOBS = Row(
    "Jobs",
    (
        Panel(
            "Jobs by phase",
            "Unfinished jobs of the selected queues by phase.",
            ((f"sum by (phase) ({of('torchrun_queue_jobs')})", "{{phase}}"),),
            stacked=True, width=12,
        ),
        Panel(
            "Why jobs wait",
            "Jobs by the reason in their status; `kubectl torchrun why JOB` shows that of one. "
            "WaitingForAdmission and Unschedulable resolve when capacity is free.",
            ((f"sum by (job_namespace, queue, reason) ({of('torchrun_queue_waiting_jobs')})", ""),),
            kind="table", width=12, value="Jobs",
        ),
        Panel(
            "Waiting, by reason",
            "Waiting jobs by reason over time.",
            ((f"sum by (reason) ({of('torchrun_queue_waiting_jobs')})", "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Longest wait",
            "Age of the longest wait in the current phase, over all queues.",
            (("max by (phase) (torchrun_jobs_oldest_seconds)", "{{phase}}"),),
            unit="s",
        ),
        Panel(
            "Finished jobs",
            "Jobs that finished in the last hour, by phase.",
            ((f"sum by (phase) (increase({of('torchrun_queue_jobs_finished_total')}[1h]))",
              "{{phase}}"),),
        ),
    ),
)  # fmt: skip

GPUS = Row(
    "GPUs",
    (
        Panel(
            "GPUs by state",
            "GPUs that run, that waiting jobs request, that are admitted, and the quota.",
            ((f"sum by (state) ({of('torchrun_queue_gpus')})", "{{state}}"),),
        ),
        Panel(
            "GPUs in use by queue",
            "GPUs of running jobs.",
            ((f"sum by (job_namespace, queue) ({of('torchrun_queue_gpus', state='running')})",
              "{{job_namespace}}/{{queue}}"),),
            stacked=True,
        ),
        Panel(
            "GPU-hours by queue",
            "GPU hours of running jobs in the selected time range.",
            ((f"sum by (job_namespace, queue) (increase({of('torchrun_queue_gpu_seconds_total')}"
              "[$__range])) / 3600", "{{job_namespace}}/{{queue}}"),),
            unit="h", kind="bargauge",
        ),
        Panel(
            "GPUs of the cluster",
            "GPUs of schedulable machines, and GPUs that TorchrunJobs use.",
            (("max(torchrun_node_gpus)", "of machines"),
             ('sum(torchrun_queue_gpus{state="running"})', "in use")),
        ),
        Panel(
            "Samples per second",
            "Total of all jobs that report progress.",
            (("sum(torchrun_training_samples_per_second)", "samples per second"),),
        ),
        Panel(
            "Jobs with progress reports",
            "Jobs that reported progress in the last minute. Other running jobs do not "
            "use torchrun_progress, or hang.",
            (("sum(torchrun_jobs_reporting)", "reporting"),
             ('sum(torchrun_jobs{phase="Running"})', "running")),
        ),
    ),
)  # fmt: skip

WAITS = Row(
    "Durations (all queues)",
    (
        Panel(
            "From submission to Running",
            "Time to start of first attempts: sync, queueing, scheduling and image pulls.",
            ((quantile(0.5, "torchrun_job_start_seconds"), "p50"),
             (quantile(0.9, "torchrun_job_start_seconds"), "p90")),
            unit="s",
        ),
        Panel(
            "Start time of a gang",
            "Time from the creation of the Job until all pods run. `later` is after a restart.",
            ((quantile(0.9, "torchrun_gang_start_seconds", "attempt"), "{{attempt}} p90"),),
            unit="s",
        ),
        Panel(
            "Time in each phase",
            "Time that jobs spent in the phase before they left it.",
            ((quantile(0.9, "torchrun_phase_seconds", "phase"), "{{phase}} p90"),),
            unit="s",
        ),
        Panel(
            "Time until admission",
            "Time to admission in queues with a quota, weight or cohort.",
            ((quantile(0.9, "torchrun_admission_seconds"), "p90"),),
            unit="s",
        ),
        Panel(
            "Workspace sync",
            "Time from the creation of the sync pod until the workspace is ready.",
            ((quantile(0.9, "torchrun_sync_seconds", "source"), "{{source}} p90"),),
            unit="s",
        ),
        Panel(
            "Workspaces",
            "Bytes written to workspaces per second.",
            ((rate("torchrun_sync_bytes_sum", "source"), "{{source}}"),),
            unit="Bps",
        ),
    ),
)  # fmt: skip

TROUBLE = Row(
    "Problems",
    (
        Panel(
            "Restarts by kind",
            "Restarts by cause. Failures count towards maxRestarts, disruptions and "
            "resizes do not.",
            ((f"sum by (kind) (increase({of('torchrun_queue_restarts_total')}[1h]))", "{{kind}}"),),
        ),
        Panel(
            "Restarts by reason (all queues)",
            "Reasons why gangs ended and were replaced.",
            (("sum by (reason) (increase(torchrun_restarts_total[1h]))", "{{reason}}"),),
        ),
        Panel(
            "Preemptions (all queues)",
            "Jobs that were preempted.",
            (("sum by (reason) (increase(torchrun_preemptions_total[1h]))", "{{reason}}"),),
        ),
        Panel(
            "Queues",
            "Whether a queue takes jobs by its present spec, and the reason.",
            ((f"min by (job_namespace, queue, reason) ({of('torchrun_queue_ready')})", ""),),
            kind="table", value="State",
            texts=(("1", "ready", "green"), ("0", "not ready", "red")),
        ),
        Panel(
            "Unfenced workers",
            "On lost machines, perhaps still running. Their jobs wait for the machine, or for the "
            "taint out-of-service.",
            (("max(torchrun_unfenced_workers)", "workers"),),
        ),
        Panel(
            "Networks (all queues)",
            "Nodes of running jobs by the network that NCCL uses. Socket is TCP.",
            (("sum by (transport) (torchrun_network_nodes)", "{{transport}}"),),
            stacked=True,
        ),
        Panel(
            "Slow networks (all queues)",
            "Running jobs with the condition SlowNetwork: their nodes use different networks, or "
            "TCP although the pods request a faster device.",
            (("max(torchrun_slow_network_jobs)", "jobs"),),
        ),
        Panel(
            "Jobs by phase (all queues)",
            "All jobs that exist, including finished ones.",
            (("sum by (phase) (torchrun_jobs)", "{{phase}}"),),
        ),
    ),
)  # fmt: skip

VIEW = dashboard(
    "torchrun-team",
    "Torchrun / Team",
    "Running jobs, waiting jobs with reasons, and usage.",
    (
        Variable("namespace", "Namespace", "torchrun_queue_jobs", "job_namespace"),
        Variable("queue", "Queue", 'torchrun_queue_jobs{job_namespace=~"$namespace"}', "queue"),
    ),
    (NOW, JOBS, GPUS, WAITS, TROUBLE),
)
