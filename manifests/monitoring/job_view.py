"""The dashboard of one job: state and progress."""

from panels import Panel, Row, Variable, dashboard, tile

J = '{job_namespace="$namespace", torchrun_job="$torchrun_job"}'


def of(metric: str) -> str:
    """A metric of the chosen job; one value, from any replica."""
    return f"max(torchrun_job_{metric}{J})"


STANDS = Row(
    "Overview (the controller needs --metrics-jobs=N for this dashboard)",
    (
        Panel(
            "Phase and reason",
            "Phase, as `kubectl get tj` shows it.",
            ((f"max by (queue, phase, reason) (torchrun_job_info{J})", ""),),
            kind="table", width=12, height=4,
        ),
        tile(
            "Time in this phase",
            "Time in the current phase.",
            f"time() - {of('phase_start_timestamp_seconds')}",
            unit="s",
        ),
        tile(
            "GPUs",
            "Number of the current attempt.",
            of("gpus"),
        ),
        tile(
            "Ran before",
            "Running time of all previous attempts.",
            of("running_seconds"),
            unit="s",
        ),
        Panel(
            "Workers",
            "Desired, running and ready pods. A pod is ready when its command runs.",
            ((f"max by (state) (torchrun_job_workers{J})", "{{state}}"),),
            width=12,
        ),
        Panel(
            "Restarts so far",
            "Restarts that count towards maxRestarts, and those that do not (disruptions, "
            "ignored failures).",
            ((f"max by (counted) (torchrun_job_restarts{J})", "counted: {{counted}}"),),
            width=12,
        ),
    ),
)  # fmt: skip

PROGRESS = Row(
    "Progress (jobs that call torchrun_progress.report)",
    (
        Panel(
            "Steps",
            "Completed and total steps.",
            ((of("step"), "done"), (of("total_steps"), "in all")),
        ),
        Panel("Loss", "Last reported loss.", ((of("loss"), "loss"),)),
        Panel(
            "Samples per second",
            "Throughput of the whole job.",
            ((of("samples_per_second"), "samples per second"),),
        ),
        Panel(
            "Time left",
            "Estimate from the rate of the last ten minutes.",
            ((f"({of('total_steps')} - {of('step')})"
              f" / (max(deriv(torchrun_job_step{J}[10m])) > 0)", "time left"),),
            unit="s",
        ),
    ),
)  # fmt: skip

VIEW = dashboard(
    "torchrun-job",
    "Torchrun / Job",
    "One job. The controller exports series for at most --metrics-jobs jobs.",
    (
        Variable("namespace", "Namespace", "torchrun_job_info", "job_namespace", multi=False),
        Variable(
            "torchrun_job",
            "Job",
            'torchrun_job_info{job_namespace="$namespace"}',
            "torchrun_job",
            multi=False,
        ),
    ),
    (STANDS, PROGRESS),
)
