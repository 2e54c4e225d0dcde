"""How exceptions report the loss of a peer. The cause is the failure of the peer, not they.

The patterns are those of `torchrun_api.contract.peer_loss`, which this package does not import. A
test compares them.
"""

from __future__ import annotations

import re

from torchrun_sdk.spec import Exited, Raised

PATTERNS = (
    r"connection (was )?(closed|reset|refused|aborted)",
    r"by peer\b",
    r"broken pipe",
    r"ncclRemoteError",
    r"remote process exited",
    r"socket timeout",
    r"timed out waiting \d+ms",
    r"read error \[",
    r"writeAny",
)
_ANY = re.compile("|".join(PATTERNS), re.IGNORECASE)
# Seconds from the exception until it counts as the cause. The controller waits for 10 s after the
# end of the pod, which comes some seconds later.
PEER_WAIT = 15.0


def is_peer_loss(end: Raised | Exited) -> bool:
    """Whether the rank ended because it lost its peer."""
    return isinstance(end, Raised) and _ANY.search(f"{end.type}: {end.text}") is not None
