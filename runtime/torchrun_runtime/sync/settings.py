"""What the pod's environment says, checked once at the start."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchrun_runtime.sync.errors import SyncError

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Limits:
    """Caps on one archive; each can be raised by TORCHRUN_SYNC_MAX_<NAME>.

    entries: members, files and directories. bytes: of the archive, and of all that it holds.
    path: bytes of one member's path; the rest of the kernel's 4096 is left for the mount path.
    depth: components of one path. ratio: bytes held per byte of the archive, asked for only above
    ratio_floor bytes (small text compresses far without harm).
    """

    entries: int = 200_000
    bytes: int = 50 * 2**30
    path: int = 3_840
    depth: int = 100
    ratio: int = 200
    ratio_floor: int = 2**30


@dataclass(frozen=True)
class Settings:
    """What to make a workspace of, and where. Times in seconds.

    sha256: the only upload that is taken, or "". token_sha256: of the token by which any is taken,
    or "". after: a revision that is known of. base:
    another workspace claim, mounted read-only, whose files need not be sent again.

    commit: the only content that is taken from elsewhere, or "". digest: of the source's own
    fields; names it in the marker. secret: name of the Secret that is mounted at secret_directory,
    "" without one.
    """

    source: str = "zip"
    url: str = ""
    ref: str = ""
    sub_path: str = ""
    commit: str = ""
    digest: str = ""
    secret: str = ""
    secret_directory: Path | None = None
    fetch_timeout: float = 3600.0
    directory: Path = Path("/workspace")
    host: str = ""
    port: int = 8080
    sha256: str = ""
    token_sha256: str = ""
    after: int = 0
    base: Path | None = None
    limits: Limits = field(default_factory=Limits)
    termination_log: Path = Path("/dev/termination-log")
    read_timeout: float = 60.0
    linger: float = 2.0


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Raises SyncError (InvalidSetting) naming the variable, its value and what it takes."""
    source = environment.get("TORCHRUN_SYNC_SOURCE", "zip")
    if source not in ("zip", "git", "s3"):
        raise _invalid("TORCHRUN_SYNC_SOURCE", source, "zip, git or s3")
    base = environment.get("TORCHRUN_SYNC_BASE", "")
    defaults = Settings()
    secret_directory = environment.get("TORCHRUN_SYNC_SECRET_DIR", "")
    return Settings(
        source=source,
        url=environment.get("TORCHRUN_SYNC_URL", ""),
        ref=environment.get("TORCHRUN_SYNC_REF", ""),
        sub_path=environment.get("TORCHRUN_SYNC_SUB_PATH", ""),
        commit=environment.get("TORCHRUN_SYNC_COMMIT", ""),
        digest=environment.get("TORCHRUN_SYNC_SOURCE_DIGEST", ""),
        secret=environment.get("TORCHRUN_SYNC_SECRET", ""),
        secret_directory=Path(secret_directory) if secret_directory else None,
        fetch_timeout=_number(environment, "TORCHRUN_SYNC_FETCH_TIMEOUT_SECONDS", 3600),
        directory=Path(environment.get("TORCHRUN_SYNC_DIR", defaults.directory)),
        host=environment.get("TORCHRUN_SYNC_HOST", defaults.host),
        port=_number(environment, "TORCHRUN_SYNC_PORT", defaults.port, lowest=0),
        sha256=_digest(environment, "TORCHRUN_SYNC_SHA256"),
        token_sha256=_digest(environment, "TORCHRUN_SYNC_UPLOAD_TOKEN_SHA256"),
        after=_number(environment, "TORCHRUN_SYNC_AFTER", 0, lowest=0),
        base=Path(base) if base else None,
        limits=_limits(environment),
        termination_log=termination_log(environment),
        read_timeout=_number(environment, "TORCHRUN_SYNC_READ_TIMEOUT_SECONDS", 60),
    )


def termination_log(environment: Mapping[str, str]) -> Path:
    """File of the termination message, which the kubelet makes."""
    return Path(environment.get("TORCHRUN_TERMINATION_LOG", Settings.termination_log))


def _limits(environment: Mapping[str, str]) -> Limits:
    default = Limits()
    prefix = "TORCHRUN_SYNC_MAX_"
    return Limits(
        entries=_number(environment, prefix + "ENTRIES", default.entries),
        bytes=_number(environment, prefix + "BYTES", default.bytes),
        path=_number(environment, prefix + "PATH", default.path),
        depth=_number(environment, prefix + "DEPTH", default.depth),
        ratio=_number(environment, prefix + "RATIO", default.ratio),
        ratio_floor=_number(environment, prefix + "RATIO_FLOOR", default.ratio_floor, lowest=0),
    )


def _digest(environment: Mapping[str, str], name: str) -> str:
    text = environment.get(name, "").lower()
    if text and not SHA256.fullmatch(text):
        raise _invalid(name, text, "64 hexadecimal digits")
    return text


def _number(environment: Mapping[str, str], name: str, default: int, lowest: int = 1) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < lowest:
        raise _invalid(name, text, f"a whole number of at least {lowest}")
    return int(text)


def _invalid(name: str, value: str, accepted: str) -> SyncError:
    message = f"{name} is {value!r}; accepted: {accepted}"
    return SyncError("InvalidSetting", message, permanent=True)
