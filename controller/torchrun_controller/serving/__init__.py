"""HTTP servers of the process: one for health and metrics, one for progress reports."""
