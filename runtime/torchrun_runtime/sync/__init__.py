"""Prepares the workspace of a job: receives or fetches it and writes it to the PVC."""
