"""The annotations of the pod, which the kubelet writes to a file (downward API).

The controller uses them to notify a running pod of changes.
"""

from __future__ import annotations


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
