"""The start gate: no rank starts before the controller opens the gate of its attempt."""

import threading
import time
from pathlib import Path

import pytest

from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.fencing import OlderWorker
from torchrun_runtime.launch.gang.leader import NO_PREDECESSOR, Predecessor
from torchrun_runtime.launch.podinfo import pass_gate, read_predecessor, workers_in
from unit.runtime.launching import Launcher


def annotations(file: Path, **values: str) -> None:
    """Write annotations as the kubelet does: a new file that replaces the old one."""
    fresh = file.with_suffix(".new")
    fresh.write_text("".join(f'{name}="{value}"\n' for name, value in values.items()))
    fresh.rename(file)


@pytest.mark.long
def test_no_rank_starts_before_the_gate_is_opened(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    annotations(file, **{"torchrun.ai/start": "1"})
    gate = {"TORCHRUN_START_FILE": str(file), "TORCHRUN_ATTEMPT": "2"}
    launched = launcher.start(f"cat {file}", **gate)
    assert launched.process.stderr
    while "waiting at the start gate" not in launched.process.stderr.readline():
        pass
    assert launched.process.poll() is None
    annotations(file, **{"other": "x", "torchrun.ai/start": "2"})
    result = launched.end()
    assert result.exit_code == 0
    assert 'start="2"' in result.out, "the command ran after the gate was opened"


def test_the_gate_stays_closed_until_it_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    passed: list[list[OlderWorker]] = []
    waiting = threading.Thread(target=lambda: passed.append(pass_gate(str(file), "2")), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    annotations(file, **{"torchrun.ai/start": "2", "torchrun.ai/fence": "now 1:0"})
    waiting.join(60)
    assert passed == [[OlderWorker(1, 0)]]


def test_an_open_gate_is_noticed_before_a_kubelet_could_write_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watchdogs of other tests may sleep meanwhile."""
    file = tmp_path / "annotations"
    pauses: list[float] = []
    gate, real_sleep = threading.current_thread(), time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not gate:
            real_sleep(seconds)
            return
        pauses.append(seconds)
        if len(pauses) == 3:
            annotations(file, **{"torchrun.ai/start": "2"})

    monkeypatch.setattr(time, "sleep", sleep)
    pass_gate(str(file), "2")
    assert len(pauses) == 3
    assert max(pauses) <= 0.1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 3", Predecessor(2, 3)),
        ("", NO_PREDECESSOR),
        ("2", NO_PREDECESSOR),
        ("2 x", NO_PREDECESSOR),
    ],
)
def test_a_pod_learns_what_an_earlier_one_left(
    tmp_path: Path, text: str, expected: Predecessor
) -> None:
    file = tmp_path / "annotations"
    annotations(file, **{"torchrun.ai/start": "2", "torchrun.ai/restarts-in-place": text})
    assert read_predecessor(str(file)) == expected


@pytest.mark.parametrize("order", ["now 1", "now 1:x", "now x:1", "now 1:1-x"])
def test_an_invalid_order_to_fence_starts_nothing(order: str) -> None:
    with pytest.raises(LaunchError) as caught:
        workers_in(order)
    assert caught.value.reason == "Fenced"
    assert repr(order.split()[1]) in caught.value.message


@pytest.mark.long
def test_an_open_gate_is_passed_silently(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    annotations(file, **{"torchrun.ai/start": "0"})
    result = launcher.run("true", TORCHRUN_START_FILE=str(file), TORCHRUN_ATTEMPT="0")
    assert (result.exit_code, "gate" in result.err) == (0, False)


@pytest.mark.long
def test_sigterm_at_the_gate_ends_the_pod(launcher: Launcher, tmp_path: Path) -> None:
    launched = launcher.start("true", TORCHRUN_START_FILE=str(tmp_path / "none"))
    assert launched.process.stderr
    while "waiting at the start gate" not in launched.process.stderr.readline():
        pass
    launched.stop()
    assert launched.end().exit_code == 143
