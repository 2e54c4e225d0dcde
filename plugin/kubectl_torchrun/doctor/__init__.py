"""`doctor`: a snapshot of the cluster, checks of it, and their report."""
