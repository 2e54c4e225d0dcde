"""Commands that may train on each node alone."""

import io

import pytest

from kubectl_torchrun.terminal import Terminal
from kubectl_torchrun.upload.command_warning import warn_of_command


def warning(**spec: object) -> str:
    err = io.StringIO()
    warn_of_command({"command": "bash train.sh", **spec}, Terminal(io.StringIO(), err))  # type: ignore[dict-item]
    return err.getvalue()


@pytest.mark.parametrize("size", [{"numNodes": 2}, {"numGPUs": 8}])
@pytest.mark.parametrize("command", ["bash train.sh", ["./train.sh"], "python a.py && python b.py"])
def test_an_opaque_command_of_several_ranks_is_named(
    command: str | list[str], size: dict[str, int]
) -> None:
    text = warning(command=command, **size)
    assert "does not run under torchrun" in text
    assert "launcher: none" in text


@pytest.mark.parametrize(
    "spec",
    [
        {"numNodes": 1},
        {"numNodes": 2, "launcher": "none"},
        {"numNodes": 2, "launcher": "torchrun"},
        {"numNodes": 2, "command": "python train.py"},
        {"numNodes": 2, "command": "cd src && uv run train.py | tee log"},
        {"numNodes": 2, "command": "cd src && torchrun train.py"},
        {"numNodes": 2, "command": ["accelerate", "launch", "train.py"]},
        {"numNodes": 2, "command": "python 'unfinished"},
        {"numNodes": 2, "command": ""},
    ],
)
def test_other_commands_are_not(spec: dict[str, object]) -> None:
    assert warning(**spec) == ""
