"""The code in the pods: a process of `rank` for each rank, one of `collect` for each client."""
