"""Errors that end a command. The message tells the next step; each class has an exit code."""

import re

from torchrun_api.contract.exit_codes import CLUSTER, TIMED_OUT, UPLOAD_FAILED, USAGE
from torchrun_api.contract.exit_codes import DETACHED as DETACHED
from torchrun_api.contract.exit_codes import REPEATED_FAILURE as REPEATED_FAILURE
from torchrun_api.contract.exit_codes import RUN_FAILED as RUN_FAILED
from torchrun_api.contract.exit_codes import SUCCEEDED as SUCCEEDED


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


def why(error: BaseException) -> str:
    """The text of a foreign error for a sentence: without the number of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return re.sub(r"\[Errno -?\d+\] ", "", str(error)) or "no reason was given"
