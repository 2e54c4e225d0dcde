"""What the workspace hides of the image is named, before the command misses it."""

from pathlib import Path

import pytest

from torchrun_runtime.launch.preparation import describe_hidden
from torchrun_runtime.launch.settings import from_environment


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"PATH": "/usr/bin:{app}/.venv/bin"}, "PATH names {app}/.venv/bin, which does not exist"),
        ({"VIRTUAL_ENV": "{app}/.venv"}, "VIRTUAL_ENV names {app}/.venv, which does not exist"),
        ({"PATH": "{app}/bin:{app}2/bin:/no/such", "PYTHONPATH": "{app}"}, ""),
    ],
)
def test_a_folder_that_the_workspace_hides(
    variables: dict[str, str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    environment = {name: value.format(app=tmp_path) for name, value in variables.items()}
    own = {"TORCHRUN_COMMAND": '"true"', "TORCHRUN_WORKSPACE_TARGET": str(tmp_path)}
    with_workspace = from_environment({**own, "TORCHRUN_WORKSPACE_SOURCE": "/source"})
    assert describe_hidden(with_workspace, environment).startswith(named.format(app=tmp_path))
    assert bool(describe_hidden(with_workspace, environment)) is bool(named)
    assert describe_hidden(from_environment(own), environment) == ""
