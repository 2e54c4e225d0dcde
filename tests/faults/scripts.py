"""The behaviour of containers in scenarios."""

import json

from bodies import Body
from faults.nodes import End, Script
from torchrun_api import names

TRAINING = 40.0  # seconds of a worker; other pods take SYNCING
SYNCING = 3.0


def well(pod: Body) -> End:
    """All pods succeed."""
    component = pod["metadata"]["labels"][names.COMPONENT_LABEL]
    return End(TRAINING if component == names.WORKER else SYNCING)


def serves(pod: Body) -> End | None:
    """Like `well`, but workers beside a head run until they are deleted."""
    return None if pod["metadata"]["labels"].get(names.ROLE_LABEL) == names.WORKER else well(pod)


def stays(pod: Body) -> End | None:
    """The pod runs until it gets SIGTERM, or until the scenario ends it."""
    return None


def first_gang_stays(pod: Body) -> End | None:
    """The first gang runs until SIGTERM."""
    return None if pod["metadata"]["labels"].get(names.ATTEMPT_LABEL) == "0" else well(pod)


def first_gang_fails(pod: Body) -> End:
    """One worker of the first gang fails."""
    labels = pod["metadata"]["labels"]
    if (labels[names.ATTEMPT_LABEL], labels[names.COMPLETION_INDEX_LABEL]) == ("0", "1"):
        return End(20.0, 1, "Traceback: no such file")
    return well(pod)


def first_gang_fails_late(pod: Body) -> End:
    """Node 0 of the first gang fails after two restarts in place, and its message counts them."""
    labels = pod["metadata"]["labels"]
    if (labels[names.ATTEMPT_LABEL], labels[names.COMPLETION_INDEX_LABEL]) == ("0", "0"):
        message = {"exitCode": 1, "reason": "Exception", "message": "x", "restartsInPlace": 2}
        return End(100.0, 1, json.dumps(message))
    return End(120.0)


def two_gangs_fail(pod: Body) -> End:
    """One worker of the first two gangs fails soon, so the third gang is delayed."""
    labels = pod["metadata"]["labels"]
    fails = (
        labels[names.ATTEMPT_LABEL] in ("0", "1") and labels[names.COMPLETION_INDEX_LABEL] == "0"
    )
    return End(5.0, 1, "no such file") if fails else well(pod)


def first_gangs_of(*jobs: str) -> Script:
    """The first gangs of these jobs run until SIGTERM; all other pods succeed."""

    def script(pod: Body) -> End | None:
        ours = pod["metadata"]["labels"].get(names.JOB_LABEL) in jobs
        return first_gang_stays(pod) if ours else well(pod)

    return script
