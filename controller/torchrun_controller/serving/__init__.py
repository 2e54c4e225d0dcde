"""HTTP ports of the process: health and metrics, and the progress that workers report."""
