"""How the work of a command ends."""

import asyncio
from pathlib import Path

import pytest

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import Cluster


async def cancelled(api: Api) -> None:
    raise asyncio.CancelledError


def test_cancelled_work_is_an_interrupt(tmp_path: Path) -> None:
    cluster = Cluster(Target(), "ml", tmp_path / "socket")
    with pytest.raises(KeyboardInterrupt):
        cluster.run(cancelled)
