"""Replacement of single pods: the Job controller replaces a lost pod, and the others keep theirs.

See docs/decisions/0011-replacement-of-single-pods.md.
"""

from datetime import timedelta

# After the grace period of a pod that is deleted, for its kubelet to report the end.
END_WITHIN = timedelta(seconds=60)
# From the end of a pod until the one that replaces it runs. The Job controller waits 10 s, 20 s and
# then 40 s of them.
REPLACE_WITHIN = timedelta(seconds=240)
# The launchers wait for longer, so that the controller decides.
_RESERVE = timedelta(seconds=30)


def launcher_seconds(grace_seconds: int) -> int:
    """Return how long the launchers wait for the replacement of a pod with this grace period."""
    waits = END_WITHIN + REPLACE_WITHIN + _RESERVE
    return grace_seconds + int(waits.total_seconds())
