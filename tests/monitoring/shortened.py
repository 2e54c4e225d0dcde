"""The alerts with shorter times, for a run of minutes.

Every `for:` becomes 2 s, every range one minute, and bounds on times are shorter (a healthy watch
may be silent for 60 s, so that one is only slightly shorter). Counts stay unchanged.
"""

import re
from pathlib import Path

ALERTS = Path(__file__).parents[2] / "manifests" / "monitoring" / "prometheus" / "alerts.yaml"
BOUNDS = {
    "torchrun_watch_age_seconds) > 180": "torchrun_watch_age_seconds) > 80",
    "torchrun_build_info) > 300": "torchrun_build_info) > 10",
    '{phase=~"Pending|Syncing"} > 3600': '{phase=~"Pending|Syncing"} > 5',
    '{phase=~"Queued|Preempted"} > 86400': '{phase=~"Queued|Preempted"} > 5',
}


def shortened() -> str:
    """The rules file. Raises AssertionError if an expected bound has changed."""
    text = ALERTS.read_text()
    for bound, shorter in BOUNDS.items():
        assert bound in text, f"no longer in alerts.yaml: {bound}"
        text = text.replace(bound, shorter)
    text = re.sub(r"(?m)^( +for:) \d+[mh]$", r"\1 2s", text)
    return re.sub(r"\[\d+[mh]\]", "[1m]", text)
