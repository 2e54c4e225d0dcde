"""Serves the workspace that the sync program made, to the workers of its job and to nobody else."""
