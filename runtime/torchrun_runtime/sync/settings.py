"""The settings of a sync pod, from its environment, validated at the start."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchrun_api.contract import launch, sync
from torchrun_api.contract.variable import Variable
from torchrun_api.kinds.workspace import SYNCED_SOURCES
from torchrun_runtime.sync.errors import SyncError

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ArchiveLimits:
    """Limits of one archive, each from TORCHRUN_SYNC_MAX_<NAME>.

    entries: files and directories. bytes: of the archive, and of its content. path: bytes of one
    member's path; the rest of the kernel's 4096 is for the mount path. depth: components of one
    path. ratio: unpacked bytes per byte of the archive, checked only above ratio_floor bytes, as
    small text may have a high ratio.
    """

    entries: int = int(sync.SYNC_MAX_ENTRIES.default)
    bytes: int = int(sync.SYNC_MAX_BYTES.default)
    path: int = int(sync.SYNC_MAX_PATH.default)
    depth: int = int(sync.SYNC_MAX_DEPTH.default)
    ratio: int = int(sync.SYNC_MAX_RATIO.default)
    ratio_floor: int = int(sync.SYNC_MAX_RATIO_FLOOR.default)


@dataclass(frozen=True)
class SyncSettings:
    """The validated environment of the pod. torchrun_api.contract.sync documents it.

    Times in seconds. Without a value texts are "", secret_directory and base None. linger: how long
    a finished pod waits for a client to read the result.
    """

    source: str = sync.SYNC_SOURCE.default
    url: str = ""
    ref: str = ""
    sub_path: str = ""
    commit: str = ""
    digest: str = ""
    job: str = ""
    secret: str = ""
    secret_directory: Path | None = None
    fetch_timeout: float = float(sync.SYNC_FETCH_TIMEOUT_SECONDS.default)
    directory: Path = Path(sync.SYNC_DIR.default)
    host: str = ""
    port: int = int(sync.SYNC_PORT.default)
    sha256: str = ""
    token_sha256: str = ""
    after: int = 0
    last_revision: int = 0
    base: Path | None = None
    limits: ArchiveLimits = field(default_factory=ArchiveLimits)
    termination_log: Path = Path(launch.TERMINATION_LOG.default)
    read_timeout: float = float(sync.SYNC_READ_TIMEOUT_SECONDS.default)
    linger: float = 2.0

    @property
    def has_run(self) -> bool:
        """Whether the job has had a workspace before."""
        return bool(self.commit or self.after)


def from_environment(environment: Mapping[str, str]) -> SyncSettings:
    """Raises SyncError (InvalidSetting) with the variable, its value and the accepted values."""
    source = sync.SYNC_SOURCE.read(environment)
    if source not in SYNCED_SOURCES:
        *others, last = SYNCED_SOURCES
        raise _invalid(sync.SYNC_SOURCE, source, f"{', '.join(others)} or {last}")
    return SyncSettings(
        source=source,
        url=sync.SYNC_URL.read(environment),
        ref=sync.SYNC_REF.read(environment),
        sub_path=sync.SYNC_SUB_PATH.read(environment),
        commit=sync.SYNC_COMMIT.read(environment),
        digest=sync.SYNC_SOURCE_DIGEST.read(environment),
        job=sync.SYNC_JOB_UID.read(environment),
        secret=sync.SYNC_SECRET.read(environment),
        secret_directory=_path(environment, sync.SYNC_SECRET_DIR),
        fetch_timeout=_number(environment, sync.SYNC_FETCH_TIMEOUT_SECONDS),
        directory=Path(sync.SYNC_DIR.read(environment)),
        host=sync.SYNC_HOST.read(environment),
        port=_number(environment, sync.SYNC_PORT, lowest=0),
        sha256=_digest(environment, sync.SYNC_SHA256),
        token_sha256=_digest(environment, sync.SYNC_UPLOAD_TOKEN_SHA256),
        after=_number(environment, sync.SYNC_AFTER, lowest=0),
        last_revision=_number(environment, sync.SYNC_LAST_REVISION, lowest=0),
        base=_path(environment, sync.SYNC_BASE),
        limits=ArchiveLimits(
            entries=_number(environment, sync.SYNC_MAX_ENTRIES),
            bytes=_number(environment, sync.SYNC_MAX_BYTES),
            path=_number(environment, sync.SYNC_MAX_PATH),
            depth=_number(environment, sync.SYNC_MAX_DEPTH),
            ratio=_number(environment, sync.SYNC_MAX_RATIO),
            ratio_floor=_number(environment, sync.SYNC_MAX_RATIO_FLOOR, lowest=0),
        ),
        termination_log=termination_log(environment),
        read_timeout=_number(environment, sync.SYNC_READ_TIMEOUT_SECONDS),
    )


def termination_log(environment: Mapping[str, str]) -> Path:
    """File of the termination message, which the kubelet creates."""
    return Path(launch.TERMINATION_LOG.read(environment))


def _path(environment: Mapping[str, str], variable: Variable[str]) -> Path | None:
    text = variable.read(environment)
    return Path(text) if text else None


def _digest(environment: Mapping[str, str], variable: Variable[str]) -> str:
    text = variable.read(environment).lower()
    if text and not SHA256.fullmatch(text):
        raise _invalid(variable, text, "64 hexadecimal digits")
    return text


def _number(environment: Mapping[str, str], variable: Variable[int], lowest: int = 1) -> int:
    text = variable.read(environment) or variable.default
    if not text.isascii() or not text.isdigit() or int(text) < lowest:
        raise _invalid(variable, text, f"an integer of at least {lowest}")
    return int(text)


def _invalid(variable: Variable[str] | Variable[int], value: str, accepted: str) -> SyncError:
    message = f"{variable.name} is {value!r}. It must be {accepted}."
    return SyncError("InvalidSetting", message, permanent=True)
