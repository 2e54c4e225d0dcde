"""The phases of a job, in a module without imports, for flags and their completion."""

PHASES = (
    *("Pending", "Syncing", "Queued", "Running", "Succeeded"),
    *("Failed", "Suspended", "TimedOut", "Preempted"),
)
NEW = "New"  # shown for a job that no controller has processed yet
