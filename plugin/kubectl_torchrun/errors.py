"""Errors that end a command. The message says what to do; each class has its exit code."""

SUCCEEDED = 0
RUN_FAILED = 1
USAGE = 2
UPLOAD_FAILED = 3
CLUSTER = 4
TIMED_OUT = 5
DETACHED = 130


class Problem(Exception):  # noqa: N818 - it is shown to users by its message alone
    """Base of the errors that a command reports without a traceback."""

    exit_code = RUN_FAILED


class UsageProblem(Problem):
    """The command cannot be carried out as it was given: nothing was created."""

    exit_code = USAGE


class RunProblem(Problem):
    """The job exists and does not run: it has ended, was deleted, or its spec is invalid."""

    exit_code = RUN_FAILED


class UploadProblem(Problem):
    """The job exists and still waits for its workspace."""

    exit_code = UPLOAD_FAILED


class ClusterProblem(Problem):
    """The cluster was not reached, or it refused."""

    exit_code = CLUSTER


class TimeoutProblem(Problem):
    """The condition of --wait was not met in time."""

    exit_code = TIMED_OUT
