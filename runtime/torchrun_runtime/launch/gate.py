"""The start gate: no rank starts beside one of an older gang that may still write checkpoints."""

from __future__ import annotations

from contextlib import suppress

from .output import say, wait_until

ANNOTATION = "torchrun.ai/start"
# The controller knows why the gate is closed and says so in the job's status; it opens the gate or
# deletes the pod. An end of our own would only turn a wait into a failure.
_FOR_EVER = float("inf")
_POLL = 0.05  # seconds; the kubelet takes 0.1 to 0.3 s to bring a patch into the file


def pass_gate(start_file: str, attempt: str) -> None:
    """Wait until the pod's annotations, a downward-API file, hold the go-ahead of this attempt."""
    if not start_file or _may_start(start_file, attempt):
        return
    say("everything is prepared; the gate opens when the last of the old gang has stopped")
    wait_until(
        lambda: _may_start(start_file, attempt),
        _FOR_EVER,
        "the go-ahead of the controller",
        pause=_POLL,
        longest_pause=_POLL,
    )


def _may_start(start_file: str, attempt: str) -> bool:
    """A file that cannot be read is a go-ahead withheld: the kubelet swaps it by a rename."""
    with suppress(OSError), open(start_file, encoding="utf-8") as file:
        return f'{ANNOTATION}="{attempt}"' in (line.strip() for line in file)
    return False
