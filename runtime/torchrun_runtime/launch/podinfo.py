"""The annotations of the pod, which the kubelet writes to a file (downward API).

The controller uses them to notify a running pod of changes.
"""

from __future__ import annotations


def values(file: str) -> dict[str, str]:
    """The values of all annotations at one moment, by name; empty if the file cannot be read.

    The kubelet replaces the file with a rename, so it may be missing for a moment.
    """
    if not file:
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines)
    return {name: quoted[1:-1] for name, _, quoted in pairs}


def annotation(file: str, name: str) -> str:
    """The value of one annotation; "" if it is not set or the file cannot be read."""
    return values(file).get(name, "")


def number(file: str, name: str) -> int:
    """An annotation as a number; 0 if it is not a number."""
    return to_number(annotation(file, name))


def to_number(text: str) -> int:
    """The number in the value of an annotation; 0 if it is not a number."""
    return int(text) if text.isdigit() else 0
