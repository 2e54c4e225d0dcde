"""A bucket behind a gateway, and the settings of a sync pod that reads it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.sync.s3 import client as s3_client
from torchrun_runtime.sync.settings import SyncSettings
from unit.runtime.s3_server import Gateway, behave, serving
from unit.runtime.sync.bucket import FILES


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with serving() as running:
        running.answer = behave(FILES)
        yield running


@pytest.fixture
def settings(tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> SyncSettings:
    monkeypatch.setattr(s3_client, "PAUSE", 0.001)
    directory = tmp_path / "claim"
    directory.mkdir()
    url = gateway.url("bucket/code")
    return SyncSettings(source="s3", url=url, directory=directory, fetch_timeout=120)
