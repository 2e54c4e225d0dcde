"""Programs that run inside the pods of a job."""
