"""One job: how it stands and how far it is."""

from panels import Panel, Row, Variable, dashboard, tile

J = '{job_namespace="$namespace", torchrun_job="$torchrun_job"}'


def of(metric: str) -> str:
    """A metric of the chosen job; one value, whichever replica told it."""
    return f"max(torchrun_job_{metric}{J})"


STANDS = Row(
    "How it stands (the controller needs --metrics-jobs=N for this dashboard)",
    (
        Panel(
            "Phase and reason",
            "As in `kubectl get tj`.",
            ((f"max by (queue, phase, reason) (torchrun_job_info{J})", ""),),
            kind="table", width=12, height=4,
        ),
        tile(
            "In this phase for",
            "Since its conditions last changed the phase.",
            f"time() - {of('phase_start_timestamp_seconds')}",
            unit="s",
        ),
        tile(
            "GPUs",
            "Of the present gang.",
            of("gpus"),
        ),
        tile(
            "Ran before",
            "Running time of the gangs before the present one.",
            of("running_seconds"),
            unit="s",
        ),
        Panel(
            "Workers",
            "Wanted, running and ready; ready is that the command runs.",
            ((f"max by (state) (torchrun_job_workers{J})", "{{state}}"),),
            width=12,
        ),
        Panel(
            "Restarts so far",
            "Counted by maxRestarts, or not (disruptions and ignored failures).",
            ((f"max by (counted) (torchrun_job_restarts{J})", "counted: {{counted}}"),),
            width=12,
        ),
    ),
)  # fmt: skip

PROGRESS = Row(
    "How far it is (jobs that call torchrun_progress.report)",
    (
        Panel(
            "Steps",
            "Done, and in all.",
            ((of("step"), "done"), (of("total_steps"), "in all")),
        ),
        Panel("Loss", "The last that was reported.", ((of("loss"), "loss"),)),
        Panel(
            "Samples per second",
            "Of the whole job.",
            ((of("samples_per_second"), "samples per second"),),
        ),
        Panel(
            "Time left",
            "At the pace of the last ten minutes.",
            ((f"({of('total_steps')} - {of('step')})"
              f" / (max(deriv(torchrun_job_step{J}[10m])) > 0)", "time left"),),
            unit="s",
        ),
    ),
)  # fmt: skip

VIEW = dashboard(
    "torchrun-job",
    "Torchrun / Job",
    "One job. Series of single jobs are told for as many as --metrics-jobs says.",
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
