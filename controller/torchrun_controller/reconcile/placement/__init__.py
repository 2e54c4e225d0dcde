"""Preferences of a gang for nodes: nodes to avoid, and nodes with its checkpoints."""
