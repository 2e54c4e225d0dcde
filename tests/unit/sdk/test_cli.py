"""Exit codes of `kt`."""

import json
from pathlib import Path

import pytest

import torchrun_sdk as kt
from torchrun_sdk import cli

pytestmark = pytest.mark.long  # processes

SCRIPT = """
import torchrun_sdk as kt
def f(): ...
remote = kt.fn(f).to(kt.Compute())
"""
CONFIG = json.dumps({"current-context": "c", "contexts": [{"context": {}}]})


@pytest.mark.parametrize("words", [["list"], ["down", "j"]])
def test_ctrl_c_during_a_command_of_kubectl(cluster: Path, words: list[str]) -> None:
    kubectl = f"#!/bin/sh\ncase $1 in config) echo '{CONFIG}';; *) kill -INT $$;; esac\n"
    (cluster.parent / "bin" / "kubectl").write_text(kubectl)
    assert cli.main(words) == 130


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (3, 4), (4, 4)])
def test_an_error_of_the_plugin(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, expected: int
) -> None:
    plugin = f"#!/bin/sh\necho 'Error: There are several queues.' >&2\nexit {code}\n"
    (cluster.parent / "bin" / "kubectl-torchrun").write_text(plugin)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert cli.main(["deploy", str(script)]) == expected
    assert capsys.readouterr().err.endswith("error: There are several queues.\n")
    with pytest.raises(kt.UsageError if code == 2 else kt.ClusterError):
        kt.App("a", "true", compute=kt.Compute(), directory=tmp_path).deploy()
