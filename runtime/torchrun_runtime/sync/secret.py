"""The mounted Secret of a source, with a file for each key."""

import re
from pathlib import Path

from torchrun_runtime.sync.errors import SyncError

_LONGEST = 1 << 20  # bytes; the API server accepts no larger Secret
# Not secret: messages about them help.
_PUBLIC = ("ca.crt", "known_hosts", "username", "AWS_REGION", "AWS_ENDPOINT_URL")
_SHORTEST_SECRET = (
    4  # characters; a shorter text is not a secret, and scrubbing it would ruin every log line
)


class Secret:
    """The keys of the job's secretRef; empty without one."""

    def __init__(self, name: str, directory: Path | None) -> None:
        self.name = name
        self.directory = directory

    def path(self, key: str) -> Path | None:
        """File of a key, or None."""
        if self.directory is None:
            return None
        path = self.directory / key
        return path if path.is_file() else None

    def text(self, key: str) -> str:
        """Value of a key without the newline at its end; "" if it is missing.

        Raises SyncError (SecretInvalid) if it is not text.
        """
        path = self.path(key)
        if path is None:
            return ""
        try:
            with path.open("rb") as file:
                return file.read(_LONGEST).decode().rstrip("\r\n")
        except UnicodeDecodeError:
            message = f"Key {key} of Secret {self.name} is not UTF-8 text."
            raise SyncError("SecretInvalid", message, permanent=False) from None

    def word(self, key: str) -> str:
        """Value of a key for a header of a request; "" if it is missing.

        Raises SyncError (SecretInvalid) if it has several lines, or characters other than ASCII.
        """
        value = self.text(key)
        if not (value.isascii() and value.isprintable()):
            message = f"Key {key} of Secret {self.name} must be one line of ASCII characters."
            raise SyncError("SecretInvalid", message, permanent=False)
        return value

    def require(self, *keys: str, why: str) -> None:
        """Raises SyncError (SecretNotFound, SecretInvalid) unless all of these keys exist.

        Neither is permanent: the Secret may be corrected, which the controller does not notice.
        """
        missing = [key for key in keys if self.path(key) is None]
        if not missing:
            return
        if not self.name:
            message = (
                f"No Secret is set: {why}. Set volumes.workspace.secretRef to a Secret with"
                f" {', '.join(keys)}."
            )
            raise SyncError("SecretNotFound", message, permanent=True)
        present = self.keys()
        if not present:
            message = (
                f"Secret {self.name} of volumes.workspace.secretRef does not exist or is empty:"
                f" {why}. Create it with {', '.join(keys)}."
            )
            raise SyncError("SecretNotFound", message, permanent=False)
        message = (
            f"Secret {self.name} lacks {', '.join(missing)} (it has {', '.join(present)}): {why}."
        )
        raise SyncError("SecretInvalid", message, permanent=False)

    def keys(self) -> list[str]:
        """Names of all keys."""
        if self.directory is None or not self.directory.is_dir():
            return []
        return sorted(p.name for p in self.directory.iterdir() if not p.name.startswith(".."))

    def scrub(self, text: str) -> str:
        """The text without lines of values, and without users in URLs."""
        for key in self.keys():
            if key not in _PUBLIC:
                path = self.path(key)
                value = path.read_bytes().decode(errors="replace") if path else ""
                for line in value.splitlines():
                    if len(line.strip()) >= _SHORTEST_SECRET:
                        text = text.replace(line.strip(), "***")
        return re.sub(r"//[^/\s@]*@", "//", text)
