"""The command line of the controller, and the modules that it imports."""

import json
import subprocess
import sys

import pytest
import uvloop

from torchrun_controller.app import _loop_factory

COMMAND = [sys.executable, "-m", "torchrun_controller"]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environ, capture_output=True, text=True, check=False
    )


def test_version() -> None:
    answer = run("--version")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("torchrun-controller ")


def test_help_has_the_essentials() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    for word in ("--runtime-image", "TORCHRUN_WORKERS", "--leader-election"):
        assert word in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--runtime-image (TORCHRUN_RUNTIME_IMAGE) is not set"),
        (("--runtime-image", "i", "--workers", "many"), "--workers (TORCHRUN_WORKERS) is 'many'"),
        (("--runtime-image", "i", "--context", "x"), "kubeconfig"),
    ],
)
def test_a_wrong_setting_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    answer = run(*arguments, HOME="/nonexistent")
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert line.startswith("torchrun-controller: ")
    assert message in line


def test_a_bug_is_one_line_with_its_traceback() -> None:
    program = (
        "from torchrun_controller import app, settings;"
        "app.run = lambda settings, signals: 1 / 0;"
        "raise SystemExit(app.main(settings.parse(['--runtime-image', 'i'], {})))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 70
    (line,) = answer.stderr.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["message"].split(";")[0]) == ("error", "a bug in the controller")
    assert "ZeroDivisionError" in entry["exception"]
    assert entry["time"].endswith("Z")


def test_uvloop_if_installed() -> None:
    assert _loop_factory(True) is uvloop.new_event_loop


def test_asyncio_if_uvloop_is_disabled() -> None:
    assert _loop_factory(False) is None


def test_asyncio_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert _loop_factory(True) is None
