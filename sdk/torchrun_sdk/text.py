"""Text of pods and of the cluster, as a terminal may have it."""

from __future__ import annotations

import re

# Control characters but tab and newline, and what reorders or breaks a line.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, and all that moves the cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links, the clipboard
    r"|\x1b.?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def escape(text: str) -> str:
    """Messages: each control character as its number, so that none commands the terminal."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def log_line(text: str) -> str:
    """A line of a log without control sequences; of a bar that draws over itself, the end."""
    return _SEQUENCE.sub("", text.rstrip("\r").rpartition("\r")[2])
