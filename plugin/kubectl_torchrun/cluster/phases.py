"""The phases of a job, for flags and their completion."""

NEW = "New"  # shown for a job that no controller has processed yet


def list_phases() -> tuple[str, ...]:
    """The phases of the API, and NEW."""
    from torchrun_api.kinds.status import PHASES  # here, because --help needs to load quickly

    return (*PHASES, NEW)
