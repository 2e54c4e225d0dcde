"""Access to a cluster through kubectl."""
