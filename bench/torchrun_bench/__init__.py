"""Measures the controller beside a bare client, on a real API server, in the same run."""
