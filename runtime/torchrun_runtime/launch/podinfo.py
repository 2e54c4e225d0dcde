"""The annotations of the pod, which the kubelet writes to a file (downward API).

The controller uses them to notify a running pod of changes.
"""

from __future__ import annotations

# Annotations of the Job controller, on the pods of a Job with backoffLimitPerIndex
# (kubernetes/pkg/controller/job/indexed_job_utils.go, addIndexFailureCountAnnotation).
_FAILURE_COUNTS = (
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)


def annotation(file: str, name: str) -> str:
    """The value of one annotation; "" if it is not set or the file cannot be read.

    The kubelet replaces the file with a rename, so it may be missing for a moment.
    """
    if not file:
        return ""
    try:
        with open(file, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return ""
    start = f'{name}="'
    return next((line[len(start) : -1] for line in lines if line.startswith(start)), "")


def number(file: str, name: str) -> int:
    """An annotation as a number; 0 if it is not a number."""
    text = annotation(file, name)
    return int(text) if text.isdigit() else 0


def count_predecessors(file: str) -> int:
    """How many pods of the same index this pod's Job had before it, and has replaced."""
    return sum(number(file, name) for name in _FAILURE_COUNTS)
