"""The source of a workspace: what its sync pod is told, and when another sync is called for."""

import hashlib

import msgspec

from torchrun_api import contract, names
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.variable import env_vars
from torchrun_api.workspace import FETCHED_SOURCES, WorkspaceVolume

SECRET_DIR = "/torchrun-secret"  # noqa: S105  # where it is mounted


def source_of(job: TorchrunJob) -> WorkspaceVolume:
    """The job's own words on its workspace; those of a job without any are the defaults."""
    return job.spec.volumes.workspace or WorkspaceVolume()


def is_fetched(job: TorchrunJob) -> bool:
    """Whether the sync pod gets the code by itself, and waits for nobody."""
    return source_of(job).source in FETCHED_SOURCES


def upload_digest(job: TorchrunJob) -> str:
    """Sha256 of the only upload that the job takes; "" where any will do."""
    return job.metadata.annotations.get(names.WORKSPACE_SHA256, "")


def upload_token(job: TorchrunJob) -> str:
    """Sha256 of the token by which any upload is taken; "" where none is, or none is awaited."""
    if is_fetched(job):
        return ""
    return job.metadata.annotations.get(names.UPLOAD_TOKEN_SHA256, "")


def stands_by(job: TorchrunJob) -> bool:
    """Whether a pod is kept for the next edit, which takes an upload by the job's token only."""
    return job.spec.development and bool(upload_token(job))


def digest(job: TorchrunJob) -> str:
    """Another value calls for another sync pod; "" for an upload that nobody asked for anew."""
    wanted = source_of(job)
    parts = (
        wanted.url,
        wanted.ref,
        wanted.sub_path,
        wanted.secret_ref.name if wanted.secret_ref else None,
        wanted.image,
        job.metadata.annotations.get(names.SYNC_REQUESTED),
    )
    if not any(parts):
        return ""
    return hashlib.sha256(msgspec.json.encode((wanted.source, *parts))).hexdigest()[:16]


def described(job: TorchrunJob) -> str:
    """The source as messages may name it: no user, no password, no query."""
    wanted = source_of(job)
    scheme, separator, rest = (wanted.url or "").partition("://")
    host, slash, path = rest.partition("/")
    url = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
    return f"{url} at {wanted.ref}" if wanted.ref else url


def environment(job: TorchrunJob, commit: str) -> list[JsonObject]:
    """v1 EnvVars that name the source; `commit`, if any, is the only content that is taken."""
    wanted = source_of(job)
    return env_vars(
        contract.SYNC_SOURCE.env_var(wanted.source),
        contract.SYNC_URL.env_var(wanted.url),
        contract.SYNC_REF.env_var(wanted.ref),
        contract.SYNC_SUB_PATH.env_var(wanted.sub_path),
        contract.SYNC_COMMIT.env_var(commit or None),
        contract.SYNC_SOURCE_DIGEST.env_var(digest(job) or None),
        contract.SYNC_SECRET.env_var(wanted.secret_ref.name if wanted.secret_ref else None),
        contract.SYNC_SECRET_DIR.env_var(SECRET_DIR if wanted.secret_ref else None),
    )


def secret_volumes(job: TorchrunJob) -> list[JsonValue]:
    """v1 Volumes of the Secret.

    Optional: without its Secret a pod would wait for ever, with a word in an event alone; so it
    starts, says what is missing, and the next one finds it.
    """
    secret = source_of(job).secret_ref
    if secret is None:
        return []
    return [{"name": "secret", "secret": {"secretName": secret.name, "optional": True}}]


def secret_mounts(job: TorchrunJob) -> list[JsonValue]:
    """v1 VolumeMounts of the same."""
    if source_of(job).secret_ref is None:
        return []
    return [{"name": "secret", "mountPath": SECRET_DIR, "readOnly": True}]
