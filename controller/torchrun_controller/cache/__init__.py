"""The caches of the cluster: informers, their stores, and the views that controllers read."""
