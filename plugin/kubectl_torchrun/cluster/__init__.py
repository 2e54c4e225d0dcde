"""The way to a cluster through kubectl, and what is read there."""
