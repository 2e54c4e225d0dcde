"""The dashboard of one job: its progress, and its last checkpoint."""

from panels import Panel, Row, Variable, dashboard

J = '{job_namespace="$namespace", torchrun_job="$torchrun_job"}'


def of(metric: str) -> str:
    """A metric of the chosen job; one value, from any replica."""
    return f"max(torchrun_job_{metric}{J})"


PROGRESS = Row(
    "Progress (jobs that call torchrun_progress; the controller needs --metrics-jobs=N)",
    (
        Panel(
            "Steps",
            "Completed steps, and those that the last complete checkpoint contains.",
            ((of("step"), "done"), (of("checkpoint_step"), "in the checkpoint")),
        ),
        Panel("Loss", "Last reported loss.", ((of("loss"), "loss"),), decimals=3),
        Panel(
            "Samples per second",
            "Throughput of the whole job.",
            ((of("samples_per_second"), "samples per second"),),
        ),
        Panel(
            "Age of the last checkpoint",
            "A failure loses the work since then. kubectl torchrun checkpoint asks for a new one.",
            ((f"time() - {of('checkpoint_timestamp_seconds')}", "age"),),
            unit="s",
        ),
    ),
)  # fmt: skip

VIEW = dashboard(
    "torchrun-job",
    "Torchrun / Job",
    "One job, at first the newest. The controller exports series for at most --metrics-jobs jobs.",
    (
        Variable("namespace", "Namespace", "torchrun_job_step", "job_namespace", multi=False),
        Variable(
            "torchrun_job",
            "Job",
            'torchrun_job_step{job_namespace="$namespace"}',
            "torchrun_job",
            multi=False,
            newest=True,
        ),
    ),
    (PROGRESS,),
)
