"""The PVCs and the code of a job: sync and setup pods, and the delivery to the workers."""
