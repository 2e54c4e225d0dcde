"""torchrun-sync: take one archive over HTTP, check it, and make it the job's workspace."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from torchrun_api.contract.exit_codes import STOPPED, SYNC_FAILED
from torchrun_api.contract.variable import SYNC
from torchrun_api.generate.contract_reference import usage
from torchrun_runtime.sync.claim import Claim, Marker, unavailable
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.report import log, terminate_with
from torchrun_runtime.sync.settings import SyncSettings, from_environment, termination_log

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject

_USAGE = f"""usage: torchrun-sync

Runs in the sync pod of a job. Receives the workspace as a zip archive by PUT /v1/upload, or its
manifest by PUT /v1/manifest and an archive of the missing files. Checks every member, extracts it
to <claim>/revisions/<n>/tree and writes the marker <claim>/.sync_success.

Environment (default):
{usage(SYNC)}

Exit status: 0 the workspace is complete; 1 it is not, and the termination message has the reason;
143 stopped by a signal (an upload continues in the next pod).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of torchrun-sync; returns the exit status."""
    if sys.argv[1:] if arguments is None else arguments:
        print(_USAGE, end="")
        return 0
    os.umask(0o022)
    settings = SyncSettings(termination_log=termination_log(os.environ))
    try:
        settings = from_environment(os.environ)
        _end_at_signal(settings)
        marker = _make_workspace(settings)
        manifest = Claim(settings.directory).manifest(marker)
    except SyncError as error:
        return _failed(settings, error.reason, error.message, error.permanent)
    except OSError as error:
        fault = unavailable(settings.directory, error)
        return _failed(settings, fault.reason, fault.message, fault.permanent)
    except Exception as error:
        # The condition of the job shows this message; a traceback would not help its user.
        log("bug", "error", traceback=traceback.format_exc())
        message = (
            f"The sync pod failed because of a bug: {error!r}. Read its log and report the bug."
        )
        return _failed(settings, "SyncFailed", message, permanent=False)
    log("workspace ready", **asdict(marker))
    terminate_with(
        settings.termination_log,
        {
            "sha256": marker.sha256,
            "files": marker.files,
            "bytes": marker.bytes,
            "revision": marker.revision,
            "manifest": manifest.sha256,
            **({"commit": marker.commit} if marker.commit else {}),
        },
    )
    return 0


def _make_workspace(settings: SyncSettings) -> Marker:
    """Receive or fetch the workspace. Each source imports only the libraries that it needs."""
    if settings.source == "zip":
        from torchrun_runtime.sync.receive import receive

        return receive(settings)
    from torchrun_runtime.sync.fetch import fetch

    return fetch(settings)


def _failed(settings: SyncSettings, reason: str, message: str, permanent: bool) -> int:
    body: JsonObject = {"reason": reason, "message": message, "permanent": permanent}
    log("failed", "error", **body)
    terminate_with(settings.termination_log, body)
    return SYNC_FAILED


def _end_at_signal(settings: SyncSettings) -> None:
    """Exit at once on SIGTERM, even if other threads run: the PVC is always consistent."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def wait() -> None:
        number = signal.sigwait(signals)
        message = (
            f"The sync pod was stopped by {signal.Signals(number).name} before the workspace was"
            " complete."
        )
        _failed(settings, "Terminated", message, permanent=False)
        os._exit(STOPPED)

    threading.Thread(target=wait, name="signals", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
