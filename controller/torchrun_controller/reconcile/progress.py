"""Progress: how a worker may report it, and when it comes into the status."""

from datetime import datetime, timedelta

from torchrun_api.json import JsonObject
from torchrun_api.status import Progress
from torchrun_controller.reconcile.objects import env
from torchrun_controller.reconcile.observed import Defaults, Observed

# Of the workers' tokens: good for nothing else, so one that leaks does little harm.
AUDIENCE = "torchrun.ai/progress"
TOKEN_DIR = "/torchrun-token"  # noqa: S105  # a path
_TOKEN_SECONDS = 3600  # the kubelet renews it well before
# At most one write of the status in so long for the progress alone.
INTERVAL = timedelta(seconds=10)


def variables(defaults: Defaults) -> list[JsonObject]:
    """What the launcher needs to know to report."""
    if not defaults.progress_url:
        return []
    return env(
        TORCHRUN_PROGRESS_URL=defaults.progress_url,
        TORCHRUN_PROGRESS_TOKEN_FILE=f"{TOKEN_DIR}/token",
    )


def volumes(defaults: Defaults) -> list[JsonObject]:
    """The token by which the controller knows the pod."""
    if not defaults.progress_url:
        return []
    token: JsonObject = {
        "audience": AUDIENCE,
        "expirationSeconds": _TOKEN_SECONDS,
        "path": "token",
    }
    sources: list[JsonObject] = [{"serviceAccountToken": token}]
    return [{"name": "progress-token", "projected": {"sources": [*sources]}}]


def mounts(defaults: Defaults) -> list[JsonObject]:
    """Where the launcher finds it."""
    if not defaults.progress_url:
        return []
    return [{"name": "progress-token", "mountPath": TOKEN_DIR, "readOnly": True}]


def shown(observed: Observed, now: datetime, *, ended: bool) -> Progress | None:
    """What the status says: the newest report, but no new one too soon; the last one at the end."""
    present, reported = observed.job.status.progress, observed.progress
    if reported is None:
        return present
    return present if not ended and _left(present, now) > 0 else reported


def left(observed: Observed, progress: Progress | None, now: datetime) -> float | None:
    """Seconds until a report that the status does not show is due."""
    if observed.progress in (None, progress):
        return None
    return _left(progress, now)


def _left(present: Progress | None, now: datetime) -> float:
    if present is None or present.time is None:
        return 0.0
    age = now - present.time
    # Of the future: the clock was set back.
    return (INTERVAL - age).total_seconds() if timedelta() <= age < INTERVAL else 0.0
