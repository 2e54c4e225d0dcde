"""The source of a workspace: its digests, and the variables and volumes of its sync pod."""

import hashlib

import msgspec

from torchrun_api import names
from torchrun_api.contract import sync
from torchrun_api.contract.variable import env_vars
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.workspace import FETCHED_SOURCES, WorkspaceVolume

SECRET_DIR = "/torchrun-secret"  # noqa: S105  # a path


def source_of(job: TorchrunJob) -> WorkspaceVolume:
    """Return the workspace of the job's spec, or the default."""
    return job.spec.volumes.workspace or WorkspaceVolume()


def is_fetched(job: TorchrunJob) -> bool:
    """Whether the sync pod fetches the code and waits for no upload."""
    return source_of(job).source in FETCHED_SOURCES


def upload_digest(job: TorchrunJob) -> str:
    """Return the sha256 of the only upload that the job accepts; "" for any upload."""
    return job.metadata.annotations.get(names.WORKSPACE_SHA256, "")


def upload_token(job: TorchrunJob) -> str:
    """Return the sha256 of the token for uploads; "" for none, or if the code is fetched."""
    if is_fetched(job):
        return ""
    return job.metadata.annotations.get(names.UPLOAD_TOKEN_SHA256, "")


def stands_by(job: TorchrunJob) -> bool:
    """Whether a sync pod waits for the next edit. It accepts only uploads with the job's token."""
    return job.spec.development and bool(upload_token(job))


def digest(job: TorchrunJob) -> str:
    """Return the digest of the source; "" for an upload without a repeated request.

    A new sync pod is created when it changes.
    """
    source = source_of(job)
    parts = (
        source.url,
        source.ref,
        source.sub_path,
        source.secret_ref.name if source.secret_ref else None,
        source.image,
        job.metadata.annotations.get(names.SYNC_REQUESTED),
    )
    if not any(parts):
        return ""
    return hashlib.sha256(msgspec.json.encode((source.source, *parts))).hexdigest()[:16]


def describe_source(job: TorchrunJob) -> str:
    """Return the source for messages, without user, password and query."""
    source = source_of(job)
    scheme, separator, rest = (source.url or "").partition("://")
    host, slash, path = rest.partition("/")
    url = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
    return f"{url} at {source.ref}" if source.ref else url


def environment(job: TorchrunJob, commit: str) -> list[JsonObject]:
    """Return the v1 EnvVars of the source. The only accepted content is `commit`, if not empty."""
    source = source_of(job)
    return env_vars(
        sync.SYNC_SOURCE.env_var(source.source),
        sync.SYNC_URL.env_var(source.url),
        sync.SYNC_REF.env_var(source.ref),
        sync.SYNC_SUB_PATH.env_var(source.sub_path),
        sync.SYNC_COMMIT.env_var(commit or None),
        sync.SYNC_SOURCE_DIGEST.env_var(digest(job) or None),
        sync.SYNC_SECRET.env_var(source.secret_ref.name if source.secret_ref else None),
        sync.SYNC_SECRET_DIR.env_var(SECRET_DIR if source.secret_ref else None),
    )


def secret_volumes(job: TorchrunJob) -> list[JsonValue]:
    """Return the v1 Volumes of the Secret.

    The Secret is optional: without it a pod would wait without limit, with only an event as the
    reason. An optional one lets the pod start and report the missing Secret; the next pod finds it.
    """
    secret = source_of(job).secret_ref
    if secret is None:
        return []
    return [{"name": "secret", "secret": {"secretName": secret.name, "optional": True}}]


def secret_mounts(job: TorchrunJob) -> list[JsonValue]:
    """Return the v1 VolumeMounts of the Secret."""
    if source_of(job).secret_ref is None:
        return []
    return [{"name": "secret", "mountPath": SECRET_DIR, "readOnly": True}]
