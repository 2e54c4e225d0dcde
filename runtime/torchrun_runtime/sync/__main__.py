"""torchrun-sync: take one archive over HTTP, check it, and make it the job's workspace."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from torchrun_api.contents import Manifest
from torchrun_api.contract import SYNC, usage
from torchrun_runtime.sync.assemble import Assembly, ranges
from torchrun_runtime.sync.authorization import Authorization
from torchrun_runtime.sync.claim import Claim, Marker
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.extract import extract
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.pending_manifest import PendingManifest
from torchrun_runtime.sync.report import log, terminate_with
from torchrun_runtime.sync.server import Server
from torchrun_runtime.sync.settings import Settings, from_environment, termination_log
from torchrun_runtime.sync.upload import Upload
from torchrun_runtime.sync.workflow import Workflow

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject

_USAGE = f"""usage: torchrun-sync

Runs in a job's sync pod. Takes the workspace as a zip archive by PUT /v1/upload, or a manifest of
it by PUT /v1/manifest and an archive of those files that are not at hand. Checks every member,
extracts it to <claim>/revisions/<n>/tree and writes the marker <claim>/.sync_success.

Environment (default):
{usage(SYNC)}

Exit status: 0 the workspace is there; 1 it is not, and the termination message says why;
143 stopped by a signal (an upload goes on in the next pod).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of torchrun-sync; returns the exit status."""
    if sys.argv[1:] if arguments is None else arguments:
        print(_USAGE, end="")
        return 0
    os.umask(0o022)
    settings = Settings(termination_log=termination_log(os.environ))
    try:
        settings = from_environment(os.environ)
        _end_at_signal(settings)
        marker = prepare(settings) if settings.source == "zip" else fetch(settings)
    except SyncError as error:
        return _failed(settings, error.reason, error.message, error.permanent)
    except OSError as error:
        fault = unavailable(settings, error)
        return _failed(settings, fault.reason, fault.message, fault.permanent)
    except Exception as error:
        # The condition of the job shows this message, and no user reads a traceback there.
        traceback.print_exc()
        message = (
            f"the sync pod failed by a fault of its own: {error!r}; see its log, and report it"
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
            "manifest": Claim(settings.directory).manifest().sha256,
            **({"commit": marker.commit} if marker.commit else {}),
        },
    )
    return 0


def prepare(settings: Settings) -> Marker:
    """Wait for an acceptable archive and publish it. Raises SyncError, OSError."""
    claim = Claim(settings.directory, settings.after)
    marker = claim.marker()
    if marker and _is_wanted(marker, settings):
        with suppress(OSError):  # the workspace is whole without it
            claim.make_state()
        claim.discard_upload()
        return marker
    claim.prepare()
    workflow = open_workflow(settings, claim)
    authorization = Authorization(settings.token_sha256, settings.sha256)
    with Server(
        settings.host, settings.port, workflow, settings.read_timeout, authorization
    ) as server:
        log("listening", port=server.port, **workflow.describe())
        try:
            return take_until_good(settings, claim, workflow)
        except (SyncError, OSError) as error:
            fault = error if isinstance(error, SyncError) else unavailable(settings, error)
            workflow.fail(fault.reason, fault.message)
            raise fault from error
        finally:
            workflow.seen.wait(settings.linger)


def _is_wanted(marker: Marker, settings: Settings) -> bool:
    if settings.sha256:
        return settings.sha256 == marker.sha256
    return marker.revision > settings.after


def open_workflow(settings: Settings, claim: Claim) -> Workflow:
    """What an earlier pod received, and what is at hand to differ from."""
    bases = [claim, *([Claim(settings.base)] if settings.base else [])]
    known = {held.sha256: held for held in (base.manifest() for base in bases) if held.entries}
    pending = PendingManifest(claim.incoming, settings.limits, known, settings.sha256)
    return Workflow(Upload(claim.incoming, settings.limits.bytes, settings.sha256), pending)


def take_until_good(settings: Settings, claim: Claim, workflow: Workflow) -> Marker:
    """Make and publish the first workspace that is acceptable. Raises SyncError, OSError."""
    assembly: Assembly | None = None
    while True:
        workflow.wait()
        manifest = workflow.pending.manifest
        try:
            if manifest is None:
                marker = _extract(settings, claim, workflow)
            else:
                if assembly is None or assembly.manifest is not manifest:
                    assembly = _compare(settings, claim, manifest)
                if not _complete(assembly, workflow):
                    continue
                claim.discard_tree()
                assembly.build()
                marker = claim.publish(manifest)
        except ArchiveError as error:
            log("archive refused", "error", reason=error.reason, message=error.message)
            workflow.refuse(error.reason, error.message)
            if manifest is None:
                claim.discard_unfinished()
                if settings.sha256:
                    raise SyncError(error.reason, error.message, permanent=True) from error
        else:
            workflow.succeed(marker.revision)
            claim.discard_upload()
            return marker


def _extract(settings: Settings, claim: Claim, workflow: Workflow) -> Marker:
    """An archive that is the whole workspace."""
    identity = workflow.upload.identity
    assert identity is not None
    claim.discard_unfinished()
    log("extracting", sha256=identity.sha256, bytes=identity.total)
    held = extract(workflow.upload.archive, claim.new, settings.limits)
    return claim.publish(held, identity.sha256)


def _compare(settings: Settings, claim: Claim, manifest: Manifest) -> Assembly:
    claim.discard_unfinished()
    assembly = Assembly(claim, manifest, settings.limits)
    assembly.take_own()
    if settings.base:
        copied = assembly.take_base(Claim(settings.base))
        log("taken from the base", bytes=copied)
    return assembly


def _complete(assembly: Assembly, workflow: Workflow) -> bool:
    """Take the archive, if one has come, and say whether nothing is missing; else ask for it."""
    if workflow.upload.complete:
        assembly.take_archive(workflow.upload.archive)
    missing = assembly.missing()
    if not missing:
        return True
    if workflow.upload.complete:
        workflow.upload.discard()
    log("missing", files=len(missing), of=assembly.manifest.files)
    workflow.ask_for(ranges(missing))
    return False


def unavailable(settings: Settings, error: OSError) -> SyncError:
    """The claim's file system failed in a way that another pod may not meet."""
    message = f"the workspace claim at {settings.directory} failed: {error}"
    return SyncError("WorkspaceUnavailable", message, permanent=False)


def _failed(settings: Settings, reason: str, message: str, permanent: bool) -> int:
    body: JsonObject = {"reason": reason, "message": message, "permanent": permanent}
    log("failed", "error", **body)
    terminate_with(settings.termination_log, body)
    return 1


def _end_at_signal(settings: Settings) -> None:
    """End at once on SIGTERM, whatever the other threads do: nothing on the claim needs more."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def wait() -> None:
        number = signal.sigwait(signals)
        message = f"stopped by {signal.Signals(number).name} before the workspace was complete"
        _failed(settings, "Terminated", message, permanent=False)
        os._exit(143)

    threading.Thread(target=wait, name="signals", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
