"""Prepares the workspace of a job: takes an archive over HTTP and extracts it onto the claim."""
