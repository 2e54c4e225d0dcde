"""The launcher on each Python of the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.runtime.launching import PYTHONS, Launcher


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(request.param, tmp_path)
    yield launcher
    launcher.clear()
