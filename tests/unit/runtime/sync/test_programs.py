"""The output of programs, in the log and in messages."""

import json
import time

import pytest

from torchrun_runtime.sync import programs
from torchrun_runtime.sync.programs import Programs

pytestmark = pytest.mark.long  # processes

SECRET = "planted"


def test_output_is_printed_without_secrets(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_PROGRESS_SECONDS", -1.0)
    ran = Programs(
        {"PATH": "/usr/bin:/bin"},
        deadline=time.monotonic() + 60,
        largest=1 << 20,
        scrub=lambda text: text.replace(SECRET, "***"),
    )
    end = "x" * 495 + SECRET  # a part of it would remain if the line was cut first
    script = f"printf 'remote: 50%% of {SECRET}\\rno {SECRET}\\n{end}\\n' >&2; exit 3"
    result = ran.run("sh", "-c", script)
    assert (result.exit_code, result.output) == (3, "no ***\n" + "x" * 495 + "***")
    assert json.loads(capfd.readouterr().out)["progress"] == "50% of ***"
