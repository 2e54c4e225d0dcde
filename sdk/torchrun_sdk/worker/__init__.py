"""What runs in the pods: one process of `rank` for each rank, one of `collect` for each client."""
