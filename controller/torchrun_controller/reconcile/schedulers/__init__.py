"""Who sees to it that all workers of a gang start together or none does: one file a scheduler."""
