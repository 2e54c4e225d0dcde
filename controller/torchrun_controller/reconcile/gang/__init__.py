"""The gang of one attempt: its start, its end, the attempt that follows, and its size."""
