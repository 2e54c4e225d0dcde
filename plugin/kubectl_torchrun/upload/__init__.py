"""From a directory to the workspace of a job."""
