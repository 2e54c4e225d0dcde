"""The UIDs of the jobs that this user created on this machine.

A pickle runs code of its author. Pickles of these jobs are opened where a call asked for pickle;
for any other job the user has to pass `trust`.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from torchrun_sdk.serialization import JSON, PICKLE

_KEPT_SECONDS = 90 * 24 * 3600.0


def record(uid: str, serialization: str) -> None:
    """Record a job of this user and the serialization that a call of it asked for.

    A home that cannot be written is ignored: `attach` then asks for `trust`.
    """
    path = _path(uid)
    if not uid or _read(path) in (serialization, PICKLE):
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _forget_old(path.parent)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(serialization, encoding="utf-8")
        temporary.replace(path)


def is_own(uid: str) -> bool:
    """Whether this user created the job on this machine."""
    return bool(_read(_path(uid)))


def accepted(uid: str) -> tuple[str, ...]:
    """The formats in which results of the job are opened without `trust`."""
    return (JSON, PICKLE) if _read(_path(uid)) == PICKLE else (JSON,)


def _path(uid: str) -> Path:
    name = hashlib.sha256(uid.encode()).hexdigest()[:32]
    return _state() / "torchrun-sdk" / "jobs" / name


def _state() -> Path:
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state)
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:  # a container with a UID that has no name: nothing can be written there
        return Path(os.devnull)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _forget_old(folder: Path) -> None:
    now = time.time()
    for path in folder.iterdir():
        with suppress(OSError):  # another process renames its temporary file, or removes it
            if now - path.stat().st_mtime > _KEPT_SECONDS:
                path.unlink()
