"""Fixtures of the plugin's tests."""

import pytest

from kubectl_torchrun.cluster import kubectl
from kubectl_torchrun.logs import follow

from .claim import claim
from .laptop import laptop, server

__all__ = ["claim", "laptop", "server"]


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every test starts without earlier uploads and confirmations."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(autouse=True)
def _long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may pause every program and thread. No test here waits for these limits."""
    monkeypatch.setattr(kubectl, "_START_SECONDS", 120.0)
    monkeypatch.setattr(follow, "_LAST_LINES_SECONDS", 300.0)
    after_end = kubectl.LastLines.after_end

    def after_all_lines(lines: kubectl.LastLines) -> list[str]:
        lines._thread.join(120)
        return after_end(lines)

    monkeypatch.setattr(kubectl.LastLines, "after_end", after_all_lines)
