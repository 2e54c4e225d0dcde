"""The one error that this package raises on purpose."""


class ClusterError(Exception):
    """A problem that the user can fix; the message tells how."""
