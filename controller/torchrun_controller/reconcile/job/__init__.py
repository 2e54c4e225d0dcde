"""Reconciles one TorchrunJob: the ordered steps, and the status and events of their decision."""
