"""The progress of a job in one line, with a bar, the rate and the ETA."""

from datetime import UTC, datetime

from kubectl_torchrun import output
from kubectl_torchrun.cluster.slices import ProgressSlice

_BAR = 24  # characters
_NARROW = 72  # columns below which a line has no room for the bar


def progress_line(progress: ProgressSlice, width: int | None, *, running: bool) -> str:
    """`step 1200 of 5000 [#####-----] 24 %   4.2 steps/s   ETA 15m   loss 2.31   3s ago`.

    running: whether the job is running. Without it, there is no rate and no ETA.
    """
    parts = []
    if progress.step is not None and progress.total_steps:
        share = min(progress.step / progress.total_steps, 1.0)
        full = round(share * _BAR)
        bar = "" if width and width < _NARROW else f"[{'#' * full}{'-' * (_BAR - full)}] "
        parts.append(f"step {progress.step} of {progress.total_steps} {bar}{share:.0%}")
    elif progress.step is not None:
        parts.append(f"step {progress.step}")
    if running and progress.steps_per_second:
        parts += _rate_and_eta(progress, progress.steps_per_second)
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.samples_per_second is not None:
        parts.append(f"{progress.samples_per_second:,.0f} samples/s")
    if progress.time is not None:
        parts.append(f"{output.age(progress.time)} ago")
    return output.GAP.join(parts)


def _rate_and_eta(progress: ProgressSlice, rate: float) -> list[str]:
    """`4.2 steps/s` or `12 s/step`, and the ETA if the total number of steps is known."""
    parts = [f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"]
    if progress.step is not None and progress.total_steps and progress.time is not None:
        since_report = (datetime.now(UTC) - progress.time).total_seconds()
        remaining = (progress.total_steps - progress.step) / rate - since_report
        parts.append(f"ETA {output.duration(max(round(remaining), 0))}")
    return parts
