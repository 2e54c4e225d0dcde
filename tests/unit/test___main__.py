"""The entry point: signal handlers first, then settings, then the controller's exit code."""

import gc
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torchrun_controller import app
from torchrun_controller.__main__ import main
from torchrun_controller.settings import Settings
from torchrun_controller.signals import Signals

HANDLED = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the signal handlers and the garbage collector."""
    monkeypatch.delenv("TORCHRUN_RUNTIME_IMAGE", raising=False)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.unfreeze()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrun-controller", *arguments])
    main()


def test_the_exit_code_is_that_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Settings, Signals | None]] = []

    def run_controller(settings: Settings, signals: Signals | None = None) -> int:
        calls.append((settings, signals))
        assert [signal.getsignal(number) for number in HANDLED] == [signals._receive] * 2
        return 70

    monkeypatch.setattr(app, "main", run_controller)
    monkeypatch.setenv("TORCHRUN_RUNTIME_IMAGE", "from-environment")
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "--workers=3")
    assert caught.value.code == 70
    ((settings, _),) = calls
    assert (settings.runtime_image, settings.workers) == ("from-environment", 3)
    assert gc.isenabled()


def test_a_wrong_setting_ends_with_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "main", lambda *_: pytest.fail("the controller must not start"))
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch)
    assert caught.value.code == app.UNUSABLE == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchrun-controller: --runtime-image (TORCHRUN_RUNTIME_IMAGE) is not")


def test_the_version_needs_no_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "main", lambda *_: pytest.fail("the controller must not start"))
    run(monkeypatch, "--version")
    assert capsys.readouterr().out.startswith("torchrun-controller ")


def test_the_import_of_the_controller_loads_no_cas_of_the_system() -> None:
    """It takes a tenth of the start. Later contexts have them."""
    script = (
        "import sys\n"
        "from torchrun_controller.__main__ import main\n"
        "sys.argv = ['torchrun-controller', '--version']\n"
        "main()\n"
        "import ssl, aiohttp.connector as connector\n"
        "contexts = connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED\n"
        "print(*(len(context.get_ca_certs()) for context in contexts))\n"
        "print(len(ssl.create_default_context().get_ca_certs()))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    *_, imported, later = result.stdout.decode().splitlines()
    assert imported == "0 0"
    assert later == str(len(ssl.create_default_context().get_ca_certs()))
