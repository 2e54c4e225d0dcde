"""The one error that this package raises on purpose."""


class ReleaseError(Exception):
    """A reason not to make a release; the message says what to do."""
