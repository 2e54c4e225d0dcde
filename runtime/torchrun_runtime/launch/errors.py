"""Errors that end the launcher before it runs the command."""

from .contract import LAUNCH_FAILED

# Of a command that cannot start: an edit of the workspace may be the cause, and the correction.
_OF_COMMAND = frozenset({"CommandNotFound", "CommandNotExecutable", "WorkingDirMissing"})


class LaunchError(Exception):
    """reason: CamelCase; the message says what to do; exit_code: of the container."""

    def __init__(self, reason: str, message: str, exit_code: int = LAUNCH_FAILED) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.exit_code = exit_code

    @property
    def is_of_command(self) -> bool:
        """Whether it is a failure of the command in its round."""
        return self.reason in _OF_COMMAND
