"""Uploaded workspaces: wait for one over HTTP, check it, publish it."""

from collections.abc import Callable
from contextlib import suppress

from torchrun_api.contract.contents import Manifest
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.assemble import Assembly, ranges
from torchrun_runtime.sync.claim import Claim, Marker, unavailable
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.pending_manifest import PendingManifest
from torchrun_runtime.sync.report import log
from torchrun_runtime.sync.server import Authorization, UploadServer
from torchrun_runtime.sync.settings import SyncSettings
from torchrun_runtime.sync.upload import ReceivedUpload
from torchrun_runtime.sync.workflow import Workflow


def receive(settings: SyncSettings) -> Marker:
    """Wait for an acceptable upload and publish it. Raises SyncError, OSError."""
    claim = Claim(settings.directory, settings.last_revision, settings.job)
    marker = claim.marker()
    is_wanted = marker and _is_wanted(marker, settings, claim)
    if marker and is_wanted and claim.is_complete(marker, claim.manifest(marker)):
        with suppress(OSError):  # the workspace is complete without it
            claim.make_state()
        claim.finish()
        return marker
    claim.prepare()
    workflow = open_workflow(settings, claim)
    authorization = Authorization(settings.token_sha256, settings.sha256)
    with UploadServer(
        settings.host, settings.port, workflow, settings.read_timeout, authorization
    ) as server:
        log("listening", port=server.port, **workflow.describe())
        try:
            marker = take_until_good(settings, claim, workflow)
        except (SyncError, OSError) as error:
            fault = (
                error if isinstance(error, SyncError) else unavailable(settings.directory, error)
            )
            workflow.fail(fault.reason, fault.message)
            workflow.result_read.wait(settings.linger)
            claim.discard_unfinished()
            if fault.reason == "WorkspaceFull" and not settings.sha256:
                # The next pod would begin with it again, and accept no smaller one.
                claim.discard_upload()
            raise fault from error
        workflow.result_read.wait(settings.linger)
        return marker


def _is_wanted(marker: Marker, settings: SyncSettings, claim: Claim) -> bool:
    if settings.sha256:
        return settings.sha256 == marker.sha256
    is_new = marker.revision > settings.after
    return is_new and claim.is_of_job(marker, has_run=settings.has_run)


def open_workflow(settings: SyncSettings, claim: Claim) -> Workflow:
    """The state that an earlier pod has received, and the manifests that differences may use."""
    marker = claim.marker()
    manifests = [claim.manifest(marker)] if marker else []
    if settings.base and (found := Claim(settings.base).base()):
        manifests.append(found[1])
    base_manifests = {manifest.sha256: manifest for manifest in manifests if manifest.entries}
    pending = PendingManifest(claim.incoming, settings.limits, base_manifests, settings.sha256)
    return Workflow(ReceivedUpload(claim.incoming, settings.limits.bytes, settings.sha256), pending)


def take_until_good(settings: SyncSettings, claim: Claim, workflow: Workflow) -> Marker:
    """Write and publish the first acceptable workspace. Raises SyncError, OSError."""
    assembly: Assembly | None = None
    while True:
        workflow.wait()
        manifest = workflow.pending.manifest
        try:
            if manifest is None:
                marker = _extract(settings, claim, workflow)
            else:
                if assembly is None or assembly.manifest is not manifest:
                    assembly = _compare(settings, claim, manifest, workflow.advance)
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
            claim.finish()
            return marker


def _extract(settings: SyncSettings, claim: Claim, workflow: Workflow) -> Marker:
    """Extract an archive of the whole workspace."""
    identity = workflow.upload.identity
    assert identity is not None
    claim.discard_unfinished()
    log("extracting", sha256=identity.sha256, bytes=identity.total)
    tree = extract(workflow.upload.archive, claim.new, settings.limits, workflow.advance)
    return claim.publish(tree, identity.sha256)


def _compare(
    settings: SyncSettings, claim: Claim, manifest: Manifest, advance: Callable[[], None]
) -> Assembly:
    claim.discard_unfinished()
    assembly = Assembly(claim, manifest, settings.limits, advance)
    assembly.reuse_own_files()
    if settings.base:
        copied = assembly.copy_from_base(Claim(settings.base))
        log("taken from the base", bytes=copied)
    return assembly


def _complete(assembly: Assembly, workflow: Workflow) -> bool:
    """Add a received archive. Returns whether nothing is missing; else requests the rest."""
    if workflow.upload.complete:
        assembly.add_archive(workflow.upload.archive)
    missing = assembly.missing()
    if not missing:
        return True
    if workflow.upload.complete:
        workflow.upload.discard()
    log("missing", files=len(missing), of=assembly.manifest.files)
    workflow.ask_for(ranges(missing))
    return False
