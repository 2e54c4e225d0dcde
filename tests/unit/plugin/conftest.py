"""Fixtures of the plugin's tests."""

import pytest

from .claim import claim
from .laptop import laptop, server

__all__ = ["claim", "laptop", "server"]


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every test starts without earlier uploads and confirmations."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
