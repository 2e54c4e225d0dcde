"""The progress of a job in one line, with a bar, the rate and the ETA."""

from kubectl_torchrun import output
from kubectl_torchrun.cluster.slices import JobStatusSlice, ProgressSlice

_BAR = 24  # characters
_NARROW = 72  # columns below which a line has no room for the bar


def progress_line(status: JobStatusSlice, width: int | None = None) -> str:
    """`step 1200 of 5000 [#####-----] 24 %   4.2 steps/s   ETA 15m   loss 2.31   3s ago`.

    Without the rate and the ETA unless the job runs. "" without a report.
    """
    progress = status.progress or ProgressSlice()
    parts = []
    if progress.step is not None and progress.total_steps:
        share = min(progress.step / progress.total_steps, 1.0)
        full = round(share * _BAR)
        bar = "" if width and width < _NARROW else f"[{'#' * full}{'-' * (_BAR - full)}] "
        parts.append(f"step {progress.step} of {progress.total_steps} {bar}{share:.0%}")
    elif progress.step is not None:
        parts.append(f"step {progress.step}")
    rate = progress.steps_per_second
    if status.phase == "Running" and rate:
        parts.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step")
    if status.estimated_remaining_seconds is not None:
        parts.append(f"ETA {output.duration(status.estimated_remaining_seconds)}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.samples_per_second is not None:
        parts.append(f"{progress.samples_per_second:,.0f} samples/s")
    if progress.time is not None:
        parts.append(f"{output.age(progress.time)} ago")
    return output.GAP.join(parts)
