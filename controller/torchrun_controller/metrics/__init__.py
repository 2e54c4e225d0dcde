"""Metrics of the controller, what they are read from, and their reference in the docs."""
