"""Warm pods: a client sends its directory and a call, and then releases the pod."""

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import torchrun_runtime.launch
from torchrun_controller.reconcile.objects.network import ROUND_PORTS
from torchrun_runtime.launch import rendezvous
from torchrun_sdk.serialization import pack, unpack
from torchrun_sdk.spec import (
    BUSY,
    CLOSED,
    FOLDER,
    FREE,
    RESULTS,
    STATE_FOLDER,
    Call,
    Exited,
    Here,
    Raised,
    Ready,
    Reference,
    Refused,
    Result,
    Started,
    Wants,
    decode,
    dump_call,
)
from torchrun_sdk.worker.call_files import WarmPod
from torchrun_sdk.worker.serve import environment

from ..pods import SECONDS, WAITS, Pod, frames

RANK_MODULES = str(Path(torchrun_runtime.launch.__file__).parent / "rank")


def hear(collector: "subprocess.Popen[str]", kind: type) -> object:
    """The next message of this type."""
    assert collector.stdout is not None
    for line in collector.stdout:
        if line != ".\n" and isinstance(word := decode(line), kind):
            return word
    raise AssertionError(f"no {kind.__name__}: {collector.stderr.read()}")


def say(collector: "subprocess.Popen[str]", **body: object) -> None:
    assert collector.stdin is not None
    collector.stdin.write(json.dumps(body) + "\n")
    collector.stdin.flush()


def manifest(files: dict[str, str]) -> str:
    lines = [
        f"{hashlib.sha256(text.encode()).hexdigest()} {len(text.encode())} 644 {path}\n"
        for path, text in files.items()
    ]
    return base64.b64encode(zlib.compress("".join(lines).encode())).decode()


def later(call: str = "c2", idle: float = WAITS, name: str = "f") -> Call:
    reference = Reference(name, script="script.py")
    return Call(call, reference, pack([(), {}], "json", "x"), linger=WAITS, idle=idle)


def connect(pod: Pod, call: str) -> "tuple[subprocess.Popen[str], Here]":
    """The client of another call, and the answer of the pod as soon as it is free."""
    while True:
        collector = pod.collect(call)
        here = hear(collector, Here)
        if here.state != BUSY:  # the ranks of the call before take their time to end
            assert (here.has_call, here.state) == (False, FREE)
            return collector, here
        hang_up(collector)


def bring(pod: Pod, call: Call, files: dict[str, str], number: int = 1) -> "subprocess.Popen[str]":
    collector, _ = connect(pod, call.id)
    say(collector, bring=manifest(files), call=json.loads(dump_call(call)))
    wanted = hear(collector, Wants).lines
    for line in wanted:
        text = list(files.values())[line]
        say(collector, content=line, data=base64.b64encode(text.encode()).decode())
    say(collector, whole=True)
    hear(collector, Ready)
    say(collector, go=number)
    return collector


def hang_up(collector: "subprocess.Popen[str]") -> None:
    collector.stdin.close()
    assert collector.wait(SECONDS) == 0


def lengthen(pod: Pod, module: str, limit: str) -> None:
    """Lengthen a limit of the processes of the pod, for a busy machine."""
    file = pod.root / FOLDER / "torchrun_sdk" / "worker" / module
    text, count = re.subn(rf"(?m)^{limit} = [\d.]+", f"{limit} = {WAITS}", file.read_text())
    assert count == 1
    file.write_text(text)


@pytest.mark.long
def test_a_later_call_runs_edited_code_in_the_same_process(make) -> None:
    pod = make("import os\ndef f(): return ['before', os.getppid()]", idle=WAITS)
    rank = pod.rank()
    first = pod.collect()
    kind, server = unpack(frames(first, Result)[-1].value)
    assert (kind, server) == ("before", rank.pid)
    hang_up(first)
    edited = {
        "script.py": "import os, new\ndef f(): return [new.x, os.getppid()]",
        "new.py": "x = 1",
    }
    second = bring(pod, later(), edited)
    assert unpack(frames(second, Result)[-1].value) == [1, rank.pid]
    hang_up(second)
    # Unchanged files are not sent again, and deleted files are removed.
    third, here = connect(pod, "c3")
    assert here.last == 1
    say(third, bring=manifest({"script.py": edited["script.py"]}),
        call=json.loads(dump_call(later("c3"))))  # fmt: skip
    assert hear(third, Wants).lines == []
    say(third, whole=True)
    hear(third, Ready)
    assert not (pod.root / "new.py").exists()
    say(third, go=2)
    assert "No module named 'new'" in frames(third, Raised)[-1].text
    assert rank.poll() is None


@pytest.mark.long
def test_deleted_files_are_removed_and_files_of_a_call_stay(make) -> None:
    pod = make("def f(): open('out', 'w').close(); open('late', 'w').close()", idle=WAITS)
    (pod.root / "old").mkdir()
    for name in ("old/file", "late"):
        (pod.root / name).touch()
    pod.rank()
    first = pod.collect()
    frames(first, Result)
    hang_up(first)
    frames(bring(pod, later(), {"script.py": "def f(): return 1"}), Result)
    assert not (pod.root / "old" / "file").exists()
    assert (pod.root / "out").exists()
    assert (pod.root / "late").exists()


@pytest.mark.long
def test_an_exited_process_is_reported_and_the_pod_stays(make) -> None:
    pod = make("import os\ndef f(): os._exit(9)\ndef g(): os.kill(os.getpid(), 9)", idle=WAITS)
    lengthen(pod, "call_files.py", "_LINGER")
    rank = pod.rank(1, 2)
    first = pod.collect()
    exited = frames(first, Exited)[-1]
    assert (exited.rank, exited.code, exited.out_of_memory) == (1, 9, False)
    hang_up(first)
    script = (pod.root / "script.py").read_text()
    second = bring(pod, later(name="g"), {"script.py": script})
    assert frames(second, Exited)[-1].code == 128 + signal.SIGKILL
    assert rank.poll() is None


@pytest.mark.long
def test_an_uncollected_error_ends_the_pod(make) -> None:
    pod = make("import os\ndef f(): os._exit(9)", idle=WAITS)
    rank = pod.rank()
    assert rank.wait(SECONDS) == 9


@pytest.mark.long
def test_a_client_can_stop_a_running_call(make) -> None:
    pod = make("import time\ndef f(): time.sleep(600)", idle=WAITS)
    rank = pod.rank()
    collector = pod.collect()
    hear(collector, Started)
    say(collector, end=True)
    hang_up(collector)
    second = bring(pod, later(), {"script.py": "def f(): return 2"})
    assert unpack(frames(second, Result)[-1].value) == 2
    assert rank.poll() is None


@pytest.mark.long
def test_a_pod_takes_one_client_at_a_time(make) -> None:
    pod = make("import time\ndef f(): time.sleep(600)", idle=WAITS)
    pod.rank()
    running = pod.collect()
    hear(running, Started)
    assert hear(pod.collect("c2"), Here) == Here(False, BUSY, 0, "c2")
    # The client of the newest call, as after a reconnect.
    back = pod.collect("")
    assert hear(back, Here).has_call
    hear(back, Started)


@pytest.mark.long
def test_a_waiting_pod_needs_no_heartbeat(make, tmp_path: Path) -> None:
    script = (
        "import os\n"
        "def f():\n"
        "    names = os.listdir(os.environ['TORCHRUN_LAUNCH_REPORTS'])\n"
        "    return [name for name in names if name.startswith('beat.')]"
    )
    pod = make(script, idle=WAITS)
    reports = tmp_path / "reports"
    reports.mkdir()
    pod.rank(PYTHONPATH=RANK_MODULES, TORCHRUN_LAUNCH_REPORTS=str(reports))
    first = pod.collect()
    assert unpack(frames(first, Result)[-1].value) == [], "while the function runs"
    hang_up(first)
    deadline = time.monotonic() + SECONDS
    while not (reports / "beat.0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (reports / "beat.0").read_bytes() == b"", "no progress was reported"
    second = bring(pod, later(), {"script.py": script})
    assert unpack(frames(second, Result)[-1].value) == []


@pytest.mark.long
def test_a_terminating_pod_accepts_no_client(make) -> None:
    pod = make("def f(): return 1", idle=0.2)
    rank = pod.rank()
    frames(pod.collect(), Result)
    assert rank.wait(SECONDS) == 0
    assert hear(pod.collect("c2"), Here).state == CLOSED


@pytest.mark.long
def test_a_connected_client_keeps_the_ranks(make) -> None:
    pod = make("def f(): return 1", idle=4.0)
    rank = pod.rank()
    first = pod.collect()
    frames(first, Result)
    client, _ = connect(pod, "c2")
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(5)
    hang_up(client)
    assert rank.wait(SECONDS) == 0


@pytest.mark.long
def test_a_new_gang_waits_for_its_client(make) -> None:
    pod = make("def f(): return 1", idle=WAITS)
    pod.rank(TORCHRUN_ATTEMPT="1")
    client = pod.collect(TORCHRUN_ATTEMPT="1")
    assert hear(client, Here) == Here(False, FREE, 0, "c1")
    script = (pod.root / "script.py").read_text()
    say(client, bring=manifest({"script.py": script}), call=json.loads(dump_call(pod.call)))
    assert hear(client, Wants).lines == []
    say(client, whole=True)
    hear(client, Ready)
    say(client, go=1)
    assert unpack(frames(client, Result)[-1].value) == 1


@pytest.mark.long
def test_a_stop_reaches_the_function_first_and_its_last_output_is_kept(make) -> None:
    script = """
    import os, signal, sys, time

    def f():
        def stopped(*_):
            print("saving\\n" * 10_000 + "saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stopped)
        os.write(1, b"ready\\n")  # the signal may arrive before a print has returned
        time.sleep(600)
    """
    pod = make(script, idle=WAITS)
    lengthen(pod, "serve.py", "_COPY_SECONDS")
    rank = pod.rank()
    assert rank.stdout is not None
    while rank.stdout.readline() != "ready\n":
        pass
    rank.terminate()
    out, _ = rank.communicate(timeout=SECONDS)
    assert "saving\nsaved\n" in out
    assert rank.returncode == 128 + signal.SIGTERM


@pytest.mark.long
def test_damaged_files_are_refused(make) -> None:
    pod = make("def f(): return 1", idle=WAITS)
    pod.rank()
    first = pod.collect()
    frames(first, Result)
    hang_up(first)
    client, _ = connect(pod, "c2")
    say(client, bring=manifest({"a.py": "one"}), call=json.loads(dump_call(later())))
    assert hear(client, Wants).lines == [0]
    say(client, content=0, data=base64.b64encode(b"two").decode())
    assert "was changed while it was sent" in hear(client, Refused).why
    assert not (pod.root / "a.py").exists()
    say(client, bring=manifest({"../a.py": "one"}), call=json.loads(dump_call(later())))
    assert "names '../a.py'" in hear(client, Refused).why


@pytest.mark.long
def test_an_edit_within_a_second_is_seen_by_python(make) -> None:
    pod = make("import part\ndef f(): return part.x", idle=WAITS)
    (pod.root / "part.py").write_text("x = 1\n")
    pod.rank()
    first = pod.collect()
    assert unpack(frames(first, Result)[-1].value) == 1
    hang_up(first)
    script = (pod.root / "script.py").read_text()
    second = bring(pod, later(), {"script.py": script, "part.py": "x = 2\n"})
    assert unpack(frames(second, Result)[-1].value) == 2


@pytest.mark.long
def test_results_outlive_the_pod(make, tmp_path: Path) -> None:
    pod = make("def f(): return 7")
    state = tmp_path / "state"
    state.mkdir()
    rank = pod.rank(TORCHRUN_STATE_DIR=str(state))
    frames(pod.collect(), Result)
    assert rank.wait(SECONDS) == 0  # it ends after they are stored
    kept = sorted((state / STATE_FOLDER / "c1").iterdir())
    assert [path.name for path in kept] == ["0.left", "0.started"]
    assert unpack(decode(kept[0].read_text()).value) == 7


def test_each_later_call_has_a_port_of_its_own() -> None:
    given = {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert environment(given, 0) == given
    made = environment(given, 3)
    assert made == {"MASTER_PORT": "29520", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert environment({}, 3) == {}


def test_no_call_uses_a_port_of_the_launchers() -> None:
    assert rendezvous.PORTS == ROUND_PORTS
    first_port, gang_port = 29500, 29500 + ROUND_PORTS
    given = {"MASTER_PORT": str(first_port)}
    ports = {int(environment(given, number)["MASTER_PORT"]) for number in range(1, 100)}
    assert ports == set(range(gang_port + 1, gang_port + 17))


@pytest.mark.long
def test_two_clients_never_share_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrun_sdk.worker.call_files._ENDING_SECONDS", 0.0)
    script = (
        "import sys; from pathlib import Path; from torchrun_sdk.worker.call_files import WarmPod;"
    )
    script += "s = WarmPod(Path(sys.argv[1])); print(s.take_state(), flush=True); sys.stdin.read()"
    sdk = {"PYTHONPATH": str(Path(__file__).parents[4] / "sdk"), "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=sdk, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline().strip() == FREE
        stay = WarmPod(tmp_path)
        assert (stay.take_state(), stay.try_close()) == (BUSY, False)
        other.communicate("")
    until = time.monotonic() + SECONDS
    while stay.take_state() != FREE:
        assert time.monotonic() < until
        time.sleep(0.01)
    stay.release()
    assert stay.try_close()
    assert stay.take_state() == CLOSED


@pytest.mark.parametrize("sign", ["0.left", "end"])
def test_a_rank_that_ends_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    monkeypatch.setattr("torchrun_sdk.worker.call_files._ENDING_SECONDS", SECONDS)
    stay = WarmPod(tmp_path)
    call = tmp_path / RESULTS / "c1"
    call.mkdir(parents=True)
    running = call / "0.running"
    running.touch()
    assert stay.take_state() == BUSY  # its call is running
    (call / sign).touch()
    with ThreadPoolExecutor() as thread:
        state = thread.submit(stay.take_state)
        assert not wait([state], 0.2).done
        running.unlink()
        assert state.result(SECONDS) == FREE
    stay.release()


def test_a_client_that_leaves_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrun_sdk.worker.call_files._ENDING_SECONDS", SECONDS)
    before, stay = WarmPod(tmp_path), WarmPod(tmp_path)
    assert before.take_state() == FREE
    with ThreadPoolExecutor() as thread:
        state = thread.submit(stay.take_state)
        assert not wait([state], 0.2).done
        before.release()
        assert state.result(SECONDS) == FREE
    stay.release()
