"""Users without a home directory."""

import pwd
from pathlib import Path

import pytest

from kubectl_torchrun.home import home

from .laptop import Laptop, play_controller


@pytest.fixture
def _homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(_: int) -> pwd.struct_passwd:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path


@pytest.mark.long
@pytest.mark.usefixtures("_homeless")
def test_commands_work_without_a_home_directory(laptop: Laptop) -> None:
    Path("torchrun.toml").write_text('queue = "q"\n')
    play_controller(laptop.server)
    result = laptop.run("submit", "--name", "run", "python train.py")
    assert result.exit_code == 0, result.output
