"""The one error that this package raises on purpose."""


class ClusterError(Exception):
    """Something that the user can mend; the message says how."""
