"""How errors say that a rank has lost its peer: it is not the cause, the failure of the peer is.

The controller, the launchers and the SDK use this list. `make generate` writes it to
runtime/torchrun_runtime/launch/contract.py for the launchers. The SDK has a copy in
sdk/torchrun_sdk/call/peer_loss.py, which a test compares.
"""

# Regular expressions for messages of gloo, NCCL and sockets when the other end is gone. Their case
# is ignored.
PEER_LOSS = (
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
