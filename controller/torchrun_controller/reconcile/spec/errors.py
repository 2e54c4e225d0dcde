"""What a user wrote and no run can be made of."""


class InvalidSpecError(ValueError):
    """A spec that no run can be made of; the text names field, value and what is accepted."""
