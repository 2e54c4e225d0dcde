"""What the containers of pods do, for scenarios."""

from bodies import Body
from faults.nodes import End, Script
from torchrun_api import names

TRAINING = 40.0  # seconds of a worker, others take SYNCING
SYNCING = 3.0


def well(pod: Body) -> End:
    """Everything succeeds."""
    component = pod["metadata"]["labels"][names.COMPONENT_LABEL]
    return End(TRAINING if component == names.WORKER else SYNCING)


def serves(pod: Body) -> End | None:
    """As `well`, but for workers beside a head, who go on until they are ended."""
    return None if pod["metadata"]["labels"].get(names.ROLE_LABEL) == names.WORKER else well(pod)


def first_gang_stays(pod: Body) -> End | None:
    """It ends when it gets SIGTERM."""
    return None if pod["metadata"]["labels"].get(names.ATTEMPT_LABEL) == "0" else well(pod)


def first_gang_fails(pod: Body) -> End:
    """One worker of the first gang fails by itself."""
    labels = pod["metadata"]["labels"]
    if (labels[names.ATTEMPT_LABEL], labels[names.COMPLETION_INDEX_LABEL]) == ("0", "1"):
        return End(20.0, 1, "Traceback: no such file")
    return well(pod)


def two_gangs_fail(pod: Body) -> End:
    """One worker of each, soon after its start, so that the third gang has to wait."""
    labels = pod["metadata"]["labels"]
    fails = (
        labels[names.ATTEMPT_LABEL] in ("0", "1") and labels[names.COMPLETION_INDEX_LABEL] == "0"
    )
    return End(5.0, 1, "no such file") if fails else well(pod)


def first_gangs_of(*jobs: str) -> Script:
    """The first gang of these jobs ends when it gets SIGTERM, everything else by itself."""

    def script(pod: Body) -> End | None:
        ours = pod["metadata"]["labels"].get(names.JOB_LABEL) in jobs
        return first_gang_stays(pod) if ours else well(pod)

    return script
