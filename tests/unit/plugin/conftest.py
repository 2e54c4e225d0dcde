"""Fixtures of the plugin's tests."""

from .laptop import laptop, server

__all__ = ["laptop", "server"]
