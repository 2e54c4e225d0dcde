"""The error of a spec that cannot run."""


class InvalidSpecError(ValueError):
    """A spec that cannot run; the text names field, value and what is accepted."""
