"""What can stop a command. Each says in its message what to do, and carries the exit code."""

SUCCEEDED = 0
RUN_FAILED = 1
USAGE = 2
UPLOAD_FAILED = 3
CLUSTER = 4
TIMED_OUT = 5
DETACHED = 130


class Problem(Exception):  # noqa: N818 - it is shown to users by its message alone
    """Base of all that a command reports instead of a traceback."""

    exit_code = RUN_FAILED


class UsageProblem(Problem):
    """The command cannot be carried out as it was given: nothing was created."""

    exit_code = USAGE


class RunProblem(Problem):
    """The job exists and comes to nothing: it has ended, was deleted, or cannot run as it is."""

    exit_code = RUN_FAILED


class UploadProblem(Problem):
    """The job exists and still waits for its workspace."""

    exit_code = UPLOAD_FAILED


class ClusterProblem(Problem):
    """The cluster was not reached, or it refused."""

    exit_code = CLUSTER


class TimeoutProblem(Problem):
    """What was waited for did not come about in time."""

    exit_code = TIMED_OUT
