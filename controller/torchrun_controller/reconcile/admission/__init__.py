"""Which jobs may run: quota, weights, preemption and backfill over all queues at once."""
