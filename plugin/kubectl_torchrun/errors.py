"""Errors that end a command. The message tells the next step; each class has an exit code."""

SUCCEEDED = 0
RUN_FAILED = 1
USAGE = 2
UPLOAD_FAILED = 3
CLUSTER = 4
TIMED_OUT = 5
DETACHED = 130


class Problem(Exception):  # noqa: N818  # users see only its message
    """Base of errors that a command reports without a traceback."""

    exit_code = RUN_FAILED


class UsageProblem(Problem):
    """Invalid usage: nothing was created or changed."""

    exit_code = USAGE


class RunProblem(Problem):
    """The job exists but does not run: it ended, was deleted, or has an invalid spec."""

    exit_code = RUN_FAILED


class UploadProblem(Problem):
    """The job exists but still waits for its workspace."""

    exit_code = UPLOAD_FAILED


class ClusterProblem(Problem):
    """The cluster is unreachable or refused the request."""

    exit_code = CLUSTER


class TimeoutProblem(Problem):
    """The condition of --wait was not met in time."""

    exit_code = TIMED_OUT
