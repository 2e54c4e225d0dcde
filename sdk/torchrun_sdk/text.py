"""Makes text from pods and the cluster safe for a terminal."""

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
    """Replace each control character of a message by its number."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def log_line(text: str) -> str:
    """Return a log line without control sequences; of a progress bar only the last state."""
    return _SEQUENCE.sub("", text.rstrip("\r").rpartition("\r")[2])
