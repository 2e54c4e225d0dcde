"""Serves a workspace to the workers of its job, and to no other clients."""
