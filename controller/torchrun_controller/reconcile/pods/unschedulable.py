"""A readable summary of why kube-scheduler placed a pod on no node.

The format is that of FitError and its plugins (kubernetes/pkg/scheduler/framework/types.go, 1.22 to
1.35): "0/12 nodes are available: 4 node(s) ..., 8 Insufficient nvidia.com/gpu. preemption: ...".
Volcano writes "unavailable" (volcano/pkg/scheduler/api/unschedule_info.go).
"""

import re

_VERDICT = re.compile(r"0/(?P<nodes>\d+) nodes are (?:un)?available: (?P<reasons>.+)", re.DOTALL)
# The reasons why preemption does not help follow. They are about the same nodes.
_END_OF_REASONS = ". "
_REASON_SEPARATOR = re.compile(r", (?=\d+ )")
_REASON = re.compile(r"(?P<count>\d+) (?P<reason>.+)", re.DOTALL)
_TAINT = re.compile(
    r"node\(s\) had (?:untolerated )?taint \{(?P<key>[^:}]+): ?(?P<value>[^}]*)\}.*"
)

# Shorter texts for common reasons. The others only lose "node(s)".
_SHORT_REASONS = {
    "Too many pods": "with too many pods",
    "node(s) had untolerated taint(s)": "tainted",
    "node(s) were unschedulable": "cordoned",
    "node(s) didn't match Pod's node affinity/selector": "not matching nodeSelector or affinity",
}


def summarize(message: str) -> str:
    """Return the message in a line, the largest count first; another format is left as it is."""
    verdict = _VERDICT.fullmatch(message.strip())
    if verdict is None:
        return message
    reasons = verdict["reasons"].partition(_END_OF_REASONS)[0].removesuffix(".")
    matches = [_REASON.fullmatch(part) for part in _REASON_SEPARATOR.split(reasons)]
    counts = [(int(match["count"]), match["reason"]) for match in matches if match is not None]
    if len(counts) < len(matches):
        # A PreFilter plugin gives one reason for all nodes, without a count.
        return f"0 of {verdict['nodes']} nodes are available: {reasons}"
    counts.sort(key=lambda entry: -entry[0])
    text = ", ".join(f"{count} {_shorten(count, reason)}" for count, reason in counts)
    return f"0 of {verdict['nodes']} nodes are available: {text}"


def _shorten(count: int, reason: str) -> str:
    taint = _TAINT.fullmatch(reason)
    if taint is not None:
        value = taint["value"].strip()
        return f"tainted ({taint['key']}={value})" if value else f"tainted ({taint['key']})"
    if reason.startswith("Insufficient "):
        lack = "lacks" if count == 1 else "lack"
        return f"{lack} {reason.removeprefix('Insufficient ')}"
    return _SHORT_REASONS.get(reason, reason.removeprefix("node(s) "))
