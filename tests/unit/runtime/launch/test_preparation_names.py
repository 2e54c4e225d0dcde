"""How long the launcher waits for the host names of its rendezvous."""

import socket

import pytest

from unit.runtime.launching import Launcher

pytestmark = pytest.mark.long  # processes


def test_waits_for_names_and_gives_up(launcher: Launcher) -> None:
    here = socket.gethostname()
    assert launcher.run("true", MASTER_ADDR="127.0.0.1").exit_code == 0
    assert launcher.run("true", PET_RDZV_ENDPOINT="localhost:29500").exit_code == 0, here
    result = launcher.run(
        "true", PET_RDZV_ENDPOINT="no-such-host.invalid:29500", TORCHRUN_RESOLVE_WAIT_SECONDS="0.2"
    )
    assert result.exit_code == 125
    assert result.message["reason"] == "MasterNotResolved"
    assert "no-such-host.invalid" in str(result.message["message"])
