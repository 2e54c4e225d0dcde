"""Commands that may train on each node alone."""

import io
from pathlib import Path

import pytest

from kubectl_torchrun.terminal import Display
from kubectl_torchrun.upload import tree
from kubectl_torchrun.upload.command_warning import warn_of_command


def warning(**spec: object) -> str:
    err = io.StringIO()
    warn_of_command({"command": "bash train.sh", **spec}, Display(io.StringIO(), err))  # type: ignore[dict-item]
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


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"command": "python trian.py"}, "the upload lacks trian.py"),
        ({"command": "python ignored.py"}, "an ignore file excludes it"),
        ({"command": "python token.pem.py", "workingDir": "src"}, "src/token.pem.py"),
        ({"command": "python train.py", "workingDir": "src"}, "the upload lacks src/train.py"),
        ({"command": "python train.py"}, ""),
        ({"command": "python ./train.py"}, ""),
        ({"command": "python /opt/train.py"}, ""),
        ({"command": "cd src && python other.py"}, ""),
        ({"command": "python made.py", "setupCommand": "touch made.py"}, ""),
        ({"command": "python 'unfinished"}, ""),
        ({}, ""),
    ],
)
def test_a_script_that_is_not_uploaded_is_named(
    spec: dict[str, object], text: str, tmp_path: Path
) -> None:
    for name, content in (("train.py", ""), ("ignored.py", ""), (".gitignore", "ignored.py\n")):
        (tmp_path / name).write_text(content)
    err = io.StringIO()
    warn_of_command(spec, Display(io.StringIO(), err), tree.scan(tmp_path))  # type: ignore[arg-type]
    assert text in err.getvalue()
    assert bool(text) == bool(err.getvalue())
