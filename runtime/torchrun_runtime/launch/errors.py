"""Errors that end the launcher before it runs the command."""

from .contract import LAUNCH_FAILED


class LaunchError(Exception):
    """reason: CamelCase; the message says what to do; exit_code: of the container."""

    def __init__(self, reason: str, message: str, exit_code: int = LAUNCH_FAILED) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.exit_code = exit_code
