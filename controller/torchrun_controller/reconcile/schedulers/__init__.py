"""Gang schedulers, which start all workers of a gang or none: one file for each."""
