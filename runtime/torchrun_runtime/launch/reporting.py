"""Reports to the controller: the progress of rank 0; restarts and checkpoints from node 0.

Reports are throttled and sent by a separate thread. A failed report is dropped, because the next
one has newer values. Only the leader of the controller's replicas accepts a report, and each
request uses a new connection, which may reach any replica. A standby answers 503; the request is
repeated at once, within the time limit for one report.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit

from .checkpoints import CheckpointReporter
from .contract import PROGRESS_PATH
from .gang.leader import RestartedRound, Restarts, TransportUse
from .output import say, valid_text
from .threads import start_thread

_POLL_SECONDS = 1.0
_PAUSE_SECONDS = 10.0  # between two reports
_REPORT_SECONDS = 1.5  # for one report with its retries
_RETRY_PAUSE = 0.1
_TIMEOUT = 5.0
_LAST_SECONDS = 2.0  # for the last report, after the end of the command
# Until a report with restarts is sent again: the controller may have lost it.
_REPEAT_SECONDS = 60.0
_LAST_ROUNDS, _MOST_NETWORKS = 3, 8  # in a report
_MESSAGE_CHARACTERS = 512
_ACCEPTED, _FORBIDDEN, _RETRIED = 204, 403, (429, 503)


def newest_step(folder: str) -> int | None:
    """The newest step in the folder of reports; None without one."""
    try:
        with open(os.path.join(folder, "progress"), "rb") as file:
            return int(json.loads(file.read())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe_restarts(
    restarts: Restarts,
    is_awaited: bool = False,
    alone: bool = False,
    networks: tuple[TransportUse, ...] = (),
) -> bytes:
    """The report of restarts in place, and of a round that waits for an edit; empty without both.

    is_awaited: there is a report in any case. The controller remembers fenced workers of older
    gangs and a wait for an edit until a report shows that the ranks run. alone: each process trains
    alone. networks: that nodes use.
    """
    if not (restarts.total or restarts.awaits_edit or is_awaited or alone or networks):
        return b""
    body: dict[str, object] = {
        "count": restarts.total,
        "last": [_describe_round(failed) for failed in restarts.last[-_LAST_ROUNDS:]],
    }
    if alone:
        body["alone"] = True
    if networks:
        body["network"] = [_describe_network(use) for use in networks[:_MOST_NETWORKS]]
    if restarts.awaits_edit:
        body["awaitsEdit"] = _describe_round(restarts.awaits_edit)
    return json.dumps({"restartsInPlace": body}, ensure_ascii=False).encode()


def _describe_network(use: TransportUse) -> dict[str, object]:
    return {
        "transport": valid_text(use.transport.name),
        "device": valid_text(use.transport.device),
        "nodes": use.nodes,
        "firstNode": use.first,
    }


def _describe_round(failed: RestartedRound) -> dict[str, object]:
    step = {} if failed.step is None else {"step": failed.step}
    return {
        **failed.cause.body(),
        "message": valid_text(failed.cause.message)[:_MESSAGE_CHARACTERS],
        "round": failed.round,
        "node": failed.node,
        "seconds": round(failed.seconds, 3),
        **step,
    }


class ReportPort(NamedTuple):
    """Where the controller accepts reports.

    url: without the path. token_file: read for each report, because the kubelet renews it.
    """

    url: str
    token_file: str


class Reporter:
    """Sends the file `progress` of a folder whenever it has changed, and `restarts` repeatedly.

    folder: empty while no ranks run. restarts: a report that only `replace` changes; empty for
    none. checkpoints: a report that is sent at once, also in the pause after another one; None for
    none.
    """

    def __init__(
        self,
        port: ReportPort,
        folder: str,
        restarts: bytes = b"",
        checkpoints: CheckpointReporter | None = None,
    ) -> None:
        self._url = urlsplit(port.url)
        self._token_file = port.token_file
        self._file = os.path.join(folder, "progress") if folder else ""
        self._checkpoints = checkpoints
        self._restarts = restarts
        self._restarts_due = 0.0 if restarts else float("inf")
        self._last_values = b""
        self._last_error = ""
        self._end = threading.Event()
        self._thread = start_thread(self._run)

    def replace(self, restarts: bytes) -> None:
        """Send this report instead of the one on restarts."""
        self._restarts, self._restarts_due = restarts, 0.0

    def close(self) -> None:
        """Send the last values; takes at most _LAST_SECONDS."""
        self._end.set()
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        pause_end = 0.0
        while not self._end.is_set():
            if time.monotonic() >= pause_end and self._report():
                pause_end = time.monotonic() + _PAUSE_SECONDS
            if self._checkpoints:
                self._checkpoints.send(self._send)
            self._end.wait(_POLL_SECONDS)
        if self._checkpoints:
            self._checkpoints.send(self._send, is_last=True)
        self._report()

    def _report(self) -> bool:
        """Send what is new or due. Returns whether there was anything, also after a failure."""
        is_due = time.monotonic() >= self._restarts_due
        sent = self._restarts
        if is_due and self._send(sent) and sent is self._restarts:
            self._restarts_due = time.monotonic() + _REPEAT_SECONDS
        try:
            with open(self._file, "rb") as file:
                values = file.read()
        except OSError:
            return is_due
        if values == self._last_values:
            return is_due
        if self._send(values):
            self._last_values = values
        return True

    def _send(self, body: bytes) -> bool:
        """Send a report, again after a refusal for a moment. Returns whether it was accepted."""
        until = time.monotonic() + _REPORT_SECONDS
        while True:
            code, wait, error = self._post(body)
            pause = max(wait, _RETRY_PAUSE)
            if code not in _RETRIED or time.monotonic() + pause > until:
                break
            time.sleep(pause)
        # A gang that was stopped is no longer the current one, whose progress counts.
        is_late = code == _FORBIDDEN and self._end.is_set()
        if error and error != self._last_error and not is_late:
            say(f"the controller does not accept the report: {error}")
            self._last_error = error
        return code == _ACCEPTED

    def _post(self, values: bytes) -> tuple[int, float, str]:
        """HTTP code (0 without a response), seconds to wait, error. Uses no proxy."""
        secure = self._url.scheme == "https"
        make = HTTPSConnection if secure else HTTPConnection
        connection = make(self._url.hostname or "", self._url.port, timeout=_TIMEOUT)
        try:
            with open(self._token_file) as file:
                token = file.read().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", self._url.path + PROGRESS_PATH, values, headers)
            answer = connection.getresponse()
            text = answer.read(200).decode("utf-8", "replace").strip()
            ok = answer.status == _ACCEPTED
            wait = float(answer.getheader("Retry-After") or 0)
            return answer.status, wait, "" if ok else f"HTTP {answer.status} {text}"
        except (OSError, HTTPException, ValueError) as error:
            return 0, 0.0, f"{type(error).__name__}: {error}"
        finally:
            with suppress(OSError):
                connection.close()
