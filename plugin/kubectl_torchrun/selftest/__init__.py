"""A self-test of a cluster: jobs that break on purpose, what was seen of them, and a report."""
