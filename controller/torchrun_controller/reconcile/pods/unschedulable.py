"""kube-scheduler's verdict on a pod, in words for a person.

The form is that of FitError and its plugins (kubernetes/pkg/scheduler/framework/types.go, 1.22 to
1.35): "0/12 nodes are available: 4 node(s) ..., 8 Insufficient nvidia.com/gpu. preemption: ...".
"""

import re

_VERDICT = re.compile(r"0/(?P<nodes>\d+) nodes are available: (?P<reasons>.+)", re.DOTALL)
# Behind the reasons stand those for which nobody was preempted: the same nodes over again.
_END_OF_REASONS = ". "
_NEXT_REASON = re.compile(r", (?=\d+ )")
_COUNTED = re.compile(r"(?P<count>\d+) (?P<reason>.+)", re.DOTALL)
_TAINT = re.compile(
    r"node\(s\) had (?:untolerated )?taint \{(?P<key>[^:}]+): ?(?P<value>[^}]*)\}.*"
)

# Reasons that read better in other words; of the rest only "node(s)" goes.
_WORDS = {
    "Too many pods": "full of pods",
    "node(s) had untolerated taint(s)": "tainted",
    "node(s) were unschedulable": "cordoned",
    "node(s) didn't match Pod's node affinity/selector": "outside of nodeSelector or affinity",
}


def summary(message: str) -> str:
    """The verdict in a line, the largest count first; a text of another form as it is."""
    verdict = _VERDICT.fullmatch(message.strip())
    if verdict is None:
        return message
    reasons = verdict["reasons"].partition(_END_OF_REASONS)[0].removesuffix(".")
    counted = [_COUNTED.fullmatch(part) for part in _NEXT_REASON.split(reasons)]
    found = [(int(match["count"]), match["reason"]) for match in counted if match is not None]
    if len(found) < len(counted):
        # One reason for all nodes alike, from before they were looked at one by one.
        return f"0 of {verdict['nodes']} nodes: {reasons}"
    found.sort(key=lambda entry: -entry[0])
    told = ", ".join(f"{count} {_in_words(count, reason)}" for count, reason in found)
    return f"0 of {verdict['nodes']} nodes: {told}"


def _in_words(count: int, reason: str) -> str:
    taint = _TAINT.fullmatch(reason)
    if taint is not None:
        value = taint["value"].strip()
        return f"tainted ({taint['key']}={value})" if value else f"tainted ({taint['key']})"
    if reason.startswith("Insufficient "):
        lack = "lacks" if count == 1 else "lack"
        return f"{lack} {reason.removeprefix('Insufficient ')}"
    return _WORDS.get(reason, reason.removeprefix("node(s) "))
