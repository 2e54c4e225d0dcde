"""Fetch, check, write and publish workspaces from git and s3."""

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from torchrun_api.contract.contents import Manifest
from torchrun_runtime.sync.address import (
    https_proxy,
    parse_git,
    resolve,
    resolve_literal,
    shown_url,
)
from torchrun_runtime.sync.claim import Claim, Marker
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.git import login
from torchrun_runtime.sync.git.source import Checkout, Git, check_ref
from torchrun_runtime.sync.paths import components
from torchrun_runtime.sync.programs import Programs
from torchrun_runtime.sync.report import log
from torchrun_runtime.sync.s3.client import Bucket
from torchrun_runtime.sync.s3.source import (
    digest,
    is_archive,
    list_prefix,
    open_bucket,
    read_archive,
    read_prefix,
)
from torchrun_runtime.sync.secret import Secret
from torchrun_runtime.sync.settings import SyncSettings


@dataclass(frozen=True)
class FetchResult:
    """The manifest of the written tree. commit: of git; for s3 a digest of the objects."""

    commit: str
    manifest: Manifest


def fetch(settings: SyncSettings) -> Marker:
    """Fetch the source and publish it, unless this job has already published it.

    A new request for the source is not bound to the commit of the previous one. Unchanged content
    does not create a revision, unless the newest one lacks files.

    Raises SyncError, OSError.
    """
    claim = Claim(settings.directory, settings.last_revision, settings.job)
    marker = claim.marker()
    if marker and claim.is_of_job(marker, has_run=settings.has_run):
        unchanged = settings.digest != "" and settings.digest == marker.source
        is_fetched = unchanged and settings.commit in ("", marker.commit)
        if is_fetched and claim.is_complete(marker, claim.manifest(marker)):
            return marker
        if not unchanged:
            settings = replace(settings, commit="")
    claim.prepare()
    try:
        check_sub_path(settings)
        claim.work.mkdir()
        fetched = FETCHERS[settings.source](settings, claim.work, claim.new)
        is_same = marker and fetched.manifest.sha256 == claim.manifest(marker).sha256
        if marker and is_same and claim.is_complete(marker, fetched.manifest):
            log("nothing has changed", commit=fetched.commit, revision=marker.revision)
            return claim.confirm(marker, commit=fetched.commit, source=settings.digest)
        return claim.publish(fetched.manifest, commit=fetched.commit, source=settings.digest)
    except ArchiveError as error:
        raise SyncError(error.reason, error.message, permanent=True) from error
    finally:
        claim.finish()


def check_sub_path(settings: SyncSettings) -> None:
    """Raises SyncError (InvalidSource), permanent, unless it is a path inside the source."""
    if not settings.sub_path:
        return
    try:
        components(settings.sub_path, settings.limits)
    except ArchiveError as error:
        message = f"volumes.workspace.subPath is invalid. {error.message}"
        raise SyncError("InvalidSource", message, permanent=True) from error


def _from_s3(settings: SyncSettings, work: Path, tree: Path) -> FetchResult:
    secret = Secret(settings.secret, settings.secret_directory)
    deadline = time.monotonic() + settings.fetch_timeout
    bucket, key = open_bucket(settings.url, secret, deadline)
    with closing(bucket):
        return _from_bucket(settings, bucket, key, work, tree)


def _from_bucket(
    settings: SyncSettings, bucket: Bucket, key: str, work: Path, tree: Path
) -> FetchResult:
    log("fetching", source=f"{bucket.endpoint.display_name}/{key}")
    if is_archive(key):
        archive = bucket.find(key)
        commit = _checked(settings, digest([archive]))
        manifest = read_archive(bucket, archive, settings.sub_path, work, tree, settings.limits)
        return FetchResult(commit, manifest)
    parts = (key.strip("/"), settings.sub_path)
    prefix = "".join(f"{part}/" for part in parts if part)
    files = list_prefix(bucket, prefix, settings.limits)
    commit = _checked(settings, digest(one for _, one in files))
    log("listed", objects=len(files), bytes=sum(one.size for _, one in files))
    return FetchResult(commit, read_prefix(bucket, files, tree))


def _checked(settings: SyncSettings, commit: str) -> str:
    """The digest of the current objects. Raises SyncError if another one is required."""
    if settings.commit in ("", commit):
        return commit
    message = (
        f"The objects of {shown_url(settings.url)} have changed since the pods of this job were"
        " created. Restore them or sync the new ones."
    )
    raise SyncError("SourceChanged", message, permanent=True)


def _from_git(settings: SyncSettings, work: Path, tree: Path) -> FetchResult:
    location = parse_git(settings.url)
    check_ref(settings.ref, settings.commit)
    checkout = Checkout(location, settings.ref, settings.commit, settings.sub_path)
    secret = Secret(settings.secret, settings.secret_directory)
    proxy = https_proxy(location.host, location.port) if location.scheme == "https" else ""
    if proxy:
        resolve_literal(location.host, location.port)
    addresses = () if proxy else resolve(location.host, location.port)
    log("fetching", source=checkout.display_name, proxied=bool(proxy))
    with tempfile.TemporaryDirectory(prefix="torchrun-sync-") as home:
        log_in = login.over_https if location.scheme == "https" else login.over_ssh
        extra_env, configuration = log_in(location, addresses, secret, Path(home))
        programs = Programs(
            login.environment(Path(home), location.scheme, proxy) | extra_env,
            deadline=time.monotonic() + settings.fetch_timeout,
            largest=settings.limits.bytes,
            scrub=secret.scrub,
        )
        git = Git(checkout, programs, work / "repository", configuration)
        commit = git.fetch()
        log("fetched", source=checkout.display_name, commit=commit)
        repository = git.list(commit, settings.limits)
        return FetchResult(commit, git.write(repository, tree, settings.limits).manifest)


# One function for each fetched source: (settings, folder for temporary files, new tree).
FETCHERS: Mapping[str, Callable[[SyncSettings, Path, Path], FetchResult]] = {
    "git": _from_git,
    "s3": _from_s3,
}
