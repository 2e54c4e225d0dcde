"""A save that a user asks for: `kubectl torchrun checkpoint` runs `main` in the pod of node 0.

It leaves a file in the folder of reports, which the launcher removes when it asks the gang, and
reads the answer of the launcher from another file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from typing import Iterator

from .contract import NODE_RANK
from .gang.stopping import ASKED, DONE, REFUSED, Agreement
from .processes import variable
from .stacks import commands

_REQUEST, _ANSWER = "save.request", "save.answer"
_POLL = 0.1
_REPEAT_SECONDS = 1.0
_START_SECONDS = 10.0  # for the launcher to see the request
_NO_RANKS = "No rank runs on this node."
_NO_ANSWER = "The launcher does not answer."
_ENDED = "The ranks have ended."
LATE = "late"  # the time for the request is over; what the ranks agree on stays in effect


class SaveRequests:
    """The requests in a folder of reports, as its launcher sees them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def is_asked(self) -> bool:
        """Whether there is a new request, which this call removes."""
        try:
            os.unlink(os.path.join(self._folder, _REQUEST))
        except OSError:
            return False
        return True

    def report(self, agreement: Agreement) -> None:
        """Leave the present state for who asks."""
        path = os.path.join(self._folder, _ANSWER)
        body = {"state": agreement.state, "call": agreement.call, "why": agreement.why}
        with suppress(OSError):
            with open(path + ".tmp", "w") as file:
                json.dump({**body, "number": agreement.number}, file)
            os.replace(path + ".tmp", path)


def main() -> int:
    """Ask the ranks of this container for a save; print each answer of `ask` as a line of JSON.

    The argument: seconds for the request. The exit code is 0 once all ranks have passed the call of
    the save.
    """
    for answer in ask(float(sys.argv[2])):
        print(json.dumps(answer))
        sys.stdout.flush()
    return 0 if answer["state"] == DONE else 1


def ask(seconds: float, job: str = "") -> Iterator[dict[str, object]]:
    """Ask for a save, and yield the present state at each change and again every second.

    The last one is DONE, or REFUSED with the reason, or LATE after these seconds. job: only of the
    job with this name, for runs on one machine.
    """
    folder = _find_folder(job)
    if not folder:
        yield _without_answer(REFUSED, _NO_RANKS)
        return
    last = before = _read(folder)
    with suppress(OSError), open(os.path.join(folder, _REQUEST), "w"):
        pass
    began = shown = time.monotonic()
    while os.path.isdir(folder):
        answer, now = _read(folder), time.monotonic()
        if answer != last or (last is not before and now - shown >= _REPEAT_SECONDS):
            last, shown = answer, now
            yield answer
            if answer["state"] in (DONE, REFUSED):
                return
        if now - began >= seconds:
            yield _without_answer(LATE)
            return
        if last is before and now - began >= _START_SECONDS:
            yield _without_answer(REFUSED, _NO_ANSWER)
            return
        time.sleep(_POLL)
    yield _without_answer(REFUSED, _ENDED)


def _without_answer(state: str, why: str = "") -> dict[str, object]:
    return {"state": state, "call": 0, "why": why}


def _find_folder(job: str) -> str:
    """The folder of reports of the command; of a run on one machine, that of node 0."""
    found = {
        variable(tree[0].pid, NODE_RANK) or "0": folder
        for folder, tree in commands(job).items()
        if os.path.isdir(folder)  # not in a container, which has another /tmp
    }
    return found[min(found)] if found else ""


def _read(folder: str) -> dict[str, object]:
    with suppress(OSError, ValueError), open(os.path.join(folder, _ANSWER)) as file:
        body = json.load(file)
        if isinstance(body, dict):
            return body
    return {"state": ASKED, "call": 0, "why": "", "number": 0}
