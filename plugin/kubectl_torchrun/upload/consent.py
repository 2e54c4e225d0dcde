"""Likely secrets that .torchrunignore includes: each is uploaded only after the user has agreed.

The file may come from a foreign repository, while .env is the user's. The answer is kept for the
directory, so the question comes once.
"""

import sys
from collections.abc import Collection
from pathlib import Path

import msgspec

from kubectl_torchrun.terminal import ask
from kubectl_torchrun.text import escape
from kubectl_torchrun.upload import tree
from kubectl_torchrun.upload.cache import state_of, write
from kubectl_torchrun.upload.tree import TORCHRUNIGNORE, Tree

_NAMED = 8  # paths in the question


def scan(directory: Path, overlay: Path | None = None, *, asks: bool = True) -> Tree:
    """The workspace of this directory, as `tree.scan`, with the secrets that the user has allowed.

    asks: whether to ask for others on a terminal; without an answer they are skipped. Raises
    UsageProblem, KeyboardInterrupt.
    """
    allowed = _read(directory)
    files = tree.scan(directory, overlay, allowed)
    found = files.included_secrets
    can_ask = asks and sys.stdin.isatty() and sys.stderr.isatty()
    if not (found and can_ask and _agree(found)):
        return files
    allowed = {*allowed, *found}
    write(state_of("secrets", directory), msgspec.msgpack.encode(sorted(allowed)))
    return tree.scan(directory, overlay, allowed)


def _agree(found: Collection[str]) -> bool:
    shown = [*found][:_NAMED]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    question = (
        f"{TORCHRUNIGNORE} includes files that may contain secrets: {', '.join(shown)}{more}."
        " Upload them? [y/N]:"
    )
    return ask(escape(question)).lower() in ("y", "yes")


def _read(directory: Path) -> set[str]:
    try:
        return set(
            msgspec.msgpack.decode(state_of("secrets", directory).read_bytes(), type=list[str])
        )
    except (OSError, msgspec.DecodeError):
        return set()
