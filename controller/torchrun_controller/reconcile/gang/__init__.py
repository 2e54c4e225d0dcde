"""The gang of one attempt: its start, its end, what comes after it, and at which size."""
