"""The launcher as a process: exit codes, signals, the workspace, and what it leaves to read."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch.workspace import copy_tree
from unit.runtime.launching import FOLDER, PYTHONS, Launcher


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(request.param, tmp_path)
    yield launcher
    launcher.clear()


def script(directory: Path, text: str, name: str = "script.py") -> str:
    (directory / name).write_text(textwrap.dedent(text))
    return name


def test_success_writes_no_termination_message(launcher: Launcher) -> None:
    result = launcher.run("echo $((6 * 7)); true")
    assert (result.exit_code, result.out, result.message) == (0, "42\n", {})


def test_runs_as_a_folder_whatever_lies_beside_it(tmp_path: Path) -> None:
    copy = tmp_path / "launch"
    shutil.copytree(FOLDER, copy)
    (tmp_path / "json.py").write_text("raise ImportError('not this one')")
    result = Launcher(PYTHONS[0], tmp_path, folder=copy).run("exit 5")
    assert result.exit_code == 5, result.err


OLD = [path for name in ("python3.7", "python3.6") if (path := shutil.which(name))]
PRETEND = """
import runpy, sys
sys.version_info = (3, 7, 16, "final", 0)
runpy.run_path({!r}, run_name="__main__")
"""


@pytest.mark.parametrize("python", [*OLD, ""], ids=lambda path: Path(path).name or "pretended")
def test_a_python_that_is_too_old_is_named(python: str, tmp_path: Path) -> None:
    if python and subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip(f"{python} does not start here")
    log = tmp_path / "termination-log"
    log.touch()
    argv = [python, str(FOLDER)] if python else [sys.executable, "-c", PRETEND.format(str(FOLDER))]
    environment = {**os.environ, "TORCHRUN_TERMINATION_LOG": str(log), "TORCHRUN_COMMAND": '"true"'}
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True)
    message = json.loads(log.read_text())
    assert (ended.returncode, message["exitCode"], message["reason"]) == (78, 78, "PythonTooOld")
    assert "needs Python 3.8 or newer" in message["message"]
    assert message["message"] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_worker_beside_a_head_is_one_above_its_index(launcher: Launcher) -> None:
    indexes = {"NODE_RANK": "2", "PET_NODE_RANK": "2"}
    tell = "echo $NODE_RANK $PET_NODE_RANK"
    assert launcher.run(tell, **indexes).out == "2 2\n"
    assert launcher.run(tell, **indexes, TORCHRUN_ROLE="head").out == "2 2\n"
    assert launcher.run(tell, **indexes, TORCHRUN_ROLE="worker").out == "3 3\n"
    refused = launcher.run(tell, TORCHRUN_ROLE="worker")
    assert refused.message["reason"] == "InvalidSetting"


def test_a_list_never_meets_a_shell(launcher: Launcher) -> None:
    assert launcher.run(["printf", "%s|", "$HOME", "; exit 3"]).out == "$HOME|; exit 3|"


@pytest.mark.parametrize(
    ("command", "exit_code", "number", "reason"),
    [
        ("exit 7", 7, None, "ExitCode"),
        ("kill -9 $$", 137, 9, "Signaled"),
        (["sh", "-c", "kill -SEGV $$"], 139, 11, "Signaled"),
        ("no-such-program x", 127, None, "ExitCode"),
        (["no-such-program"], 127, None, "CommandNotFound"),
        (["/etc/passwd"], 126, None, "CommandNotExecutable"),
    ],
)
def test_exit_codes(
    launcher: Launcher,
    command: "str | list[str]",
    exit_code: int,
    number: "int | None",
    reason: str,
) -> None:
    result = launcher.run(command)
    assert result.exit_code == exit_code
    assert result.message["exitCode"] == exit_code
    assert result.message["signal"] == number
    assert result.message["reason"] == reason
    assert result.message["rank"] is None
    assert str(result.message["time"]).endswith("Z")


def test_tells_the_exception_that_ended_a_python_program(launcher: Launcher) -> None:
    name = script(launcher.directory, "raise ValueError('bad batch')")
    result = launcher.run(f"{launcher.python} {name}", TORCHRUN_LAUNCHER="none")
    assert result.exit_code == 1
    assert result.message["message"] == "ValueError: bad batch"
    assert "Traceback" in result.err


def test_runs_the_sitecustomize_that_it_hides(launcher: Launcher) -> None:
    own = launcher.directory / "own"
    own.mkdir()
    script(own, "import sys; sys.marked = 'by the image'", "sitecustomize.py")
    command = [launcher.python, "-c", "import sys; print(sys.marked); raise KeyError('k')"]
    result = launcher.run(command, TORCHRUN_LAUNCHER="none", PYTHONPATH=str(own))
    assert result.out == "by the image\n"
    assert result.message["message"] == "KeyError: 'k'"


def test_works_where_nothing_can_be_written(launcher: Launcher) -> None:
    result = launcher.run("exit 3", TORCHRUN_TERMINATION_LOG="/proc/none", TMPDIR="/proc")
    assert result.exit_code == 3
    assert result.message == {}


def test_creates_no_termination_log_of_its_own(launcher: Launcher) -> None:
    path = launcher.directory / "none"
    assert launcher.run("exit 3", TORCHRUN_TERMINATION_LOG=str(path)).exit_code == 3
    assert not path.exists()


def test_output_is_unbuffered_unless_told_otherwise(launcher: Launcher) -> None:
    assert launcher.run("echo $PYTHONUNBUFFERED").out == "1\n"
    assert launcher.run("echo $PYTHONUNBUFFERED;", PYTHONUNBUFFERED="").out == "\n"


RANKS = """
    import os, signal, sys, time
    def saving(number, frame):
        os.write(1, b"saving %d\\n" % number)
        sys.exit(0)
    signal.signal(signal.SIGTERM, saving)
    signal.signal(signal.SIGINT, saving)
    os.write(1, b"ready\\n")
    while True:
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "line", ["{python} {name}", "cd . && {python} {name}", "true; {python} {name}; true"]
)
def test_passes_signals_to_the_program_inside_the_shell(
    launcher: Launcher, number: int, line: str
) -> None:
    name = script(launcher.directory, RANKS)
    command = line.format(python=launcher.python, name=name)
    launched = launcher.start(command, TORCHRUN_LAUNCHER="none")
    assert launched.line() == "ready"
    launched.stop(number)
    result = launched.end()
    assert f"saving {number}" in result.out
    assert result.exit_code == 143
    assert result.message["reason"] == "Stopped"
    assert result.message["signal"] == number


# Takes its time to end, which is not cut short by the shell around it: that is not told to end.
# Told by sigwait: a handler may run too late for pause(), or in the midst of a wait() for a rank.
AGENT = """
    import os, signal, subprocess, sys, time
    ranks = [
        subprocess.Popen([sys.executable, "rank.py"], env=dict(os.environ, LOCAL_RANK=str(n)))
        for n in range(2)
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.sigwait([signal.SIGTERM])
    alive = sum(rank.poll() is None for rank in ranks)
    time.sleep(0.5)
    os.write(1, b"agent told, ranks left: %d\\n" % alive)
    sys.exit(1)
"""


def test_signals_the_ranks_first_and_their_parent_after_them(launcher: Launcher) -> None:
    script(
        launcher.directory, RANKS.replace("sys.exit(0)", "time.sleep(0.5); sys.exit(0)"), "rank.py"
    )
    agent = script(launcher.directory, AGENT, "agent.py")
    launched = launcher.start(f"true && {launcher.python} {agent}")
    assert [launched.line(), launched.line()] == ["ready", "ready"]
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == ["saving 15", "saving 15", "agent told, ranks left: 0"]
    assert result.exit_code == 143


# As torchrun: where a rank fails, the others get SIGTERM, and SIGKILL after a while.
HASTY_AGENT = """
    import os, signal, subprocess, sys, time
    programs = [("rank.py", 0), ("other.py", 1)]
    ranks = [
        subprocess.Popen([sys.executable, name], env=dict(os.environ, LOCAL_RANK=str(n)))
        for name, n in programs
    ]
    while not any(rank.poll() for rank in ranks):
        time.sleep(0.5)
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    time.sleep(0.5)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    sys.exit(1)
"""
SAVING = """
    import os, signal, sys, time
    def save(number, frame):
        os.write(1, b"saving\\n")
        time.sleep(2)
        os.write(1, b"saved\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    os.write(1, b"ready\\n")
    while True:
        time.sleep(60)
"""
# One that dies of the signal, and one that has a handler and fails some time after it.
OTHERS = {
    "dies": "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
    "fails": "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(1)))",
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_rank_saves_to_its_end_whatever_becomes_of_the_others(
    launcher: Launcher, other: str
) -> None:
    """A second SIGTERM would call its handler once more, in the midst of the first call."""
    handler = "signal.signal(signal.SIGTERM, save)"
    script(launcher.directory, SAVING, "rank.py")
    script(launcher.directory, SAVING.replace(handler, OTHERS[other]), "other.py")
    agent = script(launcher.directory, HASTY_AGENT, "agent.py")
    launched = launcher.start([launcher.python, agent], TORCHRUN_LAUNCHER="none")
    assert [launched.line(), launched.line()] == ["ready", "ready"]
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == ["saving", "saved"]
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")


# Notices the end of a rank at once, and then terminates the others. Tells when it was halted.
PROMPT_AGENT = """
    import os, signal, subprocess, sys
    signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"agent continued\\n"))
    signal.signal(signal.SIGTERM, lambda *_: None)
    others = [["sleep", "100"]] * int(sys.argv[1])
    ranks = [
        subprocess.Popen(argv, env=dict(os.environ, LOCAL_RANK=str(n))).pid
        for n, argv in enumerate([*others, [sys.executable, "rank.py"]])
    ]
    while ranks:
        ranks.remove(os.wait()[0])
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
"""


def test_the_agent_is_halted_before_a_rank_dies_of_the_signal(launcher: Launcher) -> None:
    """It would send the rank that saves a second SIGTERM while others still get their first."""
    script(launcher.directory, SAVING, "rank.py")
    agent = script(launcher.directory, PROMPT_AGENT, "agent.py")
    launched = launcher.start([launcher.python, agent, "50"], TORCHRUN_LAUNCHER="none")
    assert launched.line() == "ready"
    launched.stop()
    assert launched.end().out.splitlines() == ["saving", "saved", "agent continued"]


@pytest.mark.parametrize(("rank", "lines"), [("saves", ["saving", "saved"]), ("dies", [])])
def test_an_agent_whose_ranks_end_alike_is_not_halted(
    launcher: Launcher, rank: str, lines: "list[str]"
) -> None:
    handler = "signal.signal(signal.SIGTERM, save)"
    text = SAVING if rank == "saves" else SAVING.replace(handler, OTHERS["dies"])
    script(launcher.directory, text, "rank.py")
    agent = script(launcher.directory, PROMPT_AGENT, "agent.py")
    command = [launcher.python, agent, "0"]
    launched = launcher.start(command, TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="30")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == lines
    assert result.exit_code == 143
    assert "SIGTERM: passed on to python" in result.err


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("trap 'echo trapped' TERM; {python} {name}; echo after", ["trapped", "after"]),
        (
            "trap 'kill -TERM $child; wait $child; echo trapped; exit' TERM;"
            " {python} {name} & child=$!; wait $child",
            ["trapped"],
        ),
        ("trap 'echo trapped' TERM; cd . && sh -c '{python} {name}; true'", ["trapped"]),
    ],
    ids=["foreground", "background", "shell in a shell"],
)
def test_runs_the_trap_of_a_shell_and_signals_its_program_once(
    launcher: Launcher, line: str, lines: "list[str]"
) -> None:
    name = script(launcher.directory, SAVING)
    command = line.format(python=launcher.python, name=name)
    launched = launcher.start(command, TORCHRUN_LAUNCHER="none")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == ["saving", "saved", *lines]
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")


def test_runs_the_trap_around_ranks_when_they_are_gone(launcher: Launcher) -> None:
    script(launcher.directory, RANKS, "rank.py")
    agent = script(launcher.directory, AGENT, "agent.py")
    line = f"trap 'sleep 1; echo trapped' TERM; {launcher.python} {agent}; echo after"
    launched = launcher.start(line, TORCHRUN_LAUNCHER="none")
    assert [launched.line(), launched.line()] == ["ready", "ready"]
    launched.stop()
    said = launched.end().out.splitlines()
    assert said == ["saving 15", "saving 15", "agent told, ranks left: 0", "trapped", "after"]


def test_kills_ranks_that_outstay_their_grace(launcher: Launcher) -> None:
    name = script(
        launcher.directory,
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        while True: signal.pause()
        """,
    )
    launched = launcher.start(
        [launcher.python, name], TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="0.2"
    )
    assert launched.line() == "ready"
    began = time.monotonic()
    launched.stop()
    assert launched.end().exit_code == 143
    assert time.monotonic() - began < 9, "long before the time of an agent is over as well"


def test_leaves_no_process_behind_and_reaps_orphans(launcher: Launcher) -> None:
    name = script(
        launcher.directory,
        """
        import os, subprocess, sys
        first = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!"], stdout=subprocess.PIPE)
        print(first.stdout.readline().decode().strip(), flush=True)
        first.wait()
        """,
    )
    result = launcher.run([launcher.python, name], TORCHRUN_LAUNCHER="none")
    assert result.exit_code == 0
    orphan = int(result.out)
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)


def test_a_program_starts_with_default_signals(launcher: Launcher) -> None:
    result = launcher.run(["grep", "^Sig[BI]", "/proc/self/status"])
    for mask in result.out.split()[1::2]:
        assert int(mask, 16) & 0x7FFFFFFF == 0, result.out


MARKER = '{"revision": 1}'


def workspace(directory: Path, ready: bool = True) -> "dict[str, str]":
    claim = directory / "claim"
    tree = claim / "revisions/1/tree"
    (tree / "pkg/empty").mkdir(parents=True)
    (tree / "train.sh").write_text("#!/bin/sh\necho from $PWD\n")
    (tree / "train.sh").chmod(0o755)
    (tree / "pkg/data.bin").write_bytes(os.urandom(3_000_000))
    if ready:
        (claim / ".sync_success").write_text(MARKER)
    return {
        "TORCHRUN_WORKSPACE_SOURCE": str(claim),
        "TORCHRUN_WORKSPACE_TARGET": str(directory / "app"),
    }


def test_copies_the_workspace_and_runs_in_it(launcher: Launcher) -> None:
    result = launcher.run("./train.sh", **workspace(launcher.directory))
    app = launcher.directory / "app"
    assert result.out == f"from {app}\n"
    copied = (app / "pkg/data.bin").read_bytes()
    assert copied == (launcher.directory / "claim/revisions/1/tree/pkg/data.bin").read_bytes()
    assert (app / "pkg/empty").is_dir()
    assert "2 files, 3000025 bytes" in result.err


def test_does_without_a_state_directory_that_it_cannot_use(launcher: Launcher) -> None:
    missing = str(launcher.directory / "missing")
    result = launcher.run("echo started", TORCHRUN_STATE_DIR=missing)
    assert (result.exit_code, result.out) == (0, "started\n")
    assert f"does without the state directory {missing}: No such file" in result.err


def test_waits_for_the_marker(launcher: Launcher) -> None:
    settings = workspace(launcher.directory, ready=False)
    launched = launcher.start("echo started", **settings)
    (launcher.directory / "claim/.sync_success").write_text(MARKER)
    assert launched.end().out == "started\n"


def test_says_that_there_was_no_marker(launcher: Launcher) -> None:
    settings = workspace(launcher.directory, ready=False)
    result = launcher.run("echo started", **settings, TORCHRUN_SYNC_WAIT_SECONDS="0.3")
    assert (result.exit_code, result.out) == (125, "")
    assert result.message["reason"] == "WorkspaceNotReady"
    assert ".sync_success is missing" in str(result.message["message"])


def test_ends_at_once_when_stopped_before_the_command(launcher: Launcher) -> None:
    settings = workspace(launcher.directory, ready=False)
    launched = launcher.start("echo started", **settings)
    # Until its handlers are there, SIGTERM would end the interpreter itself.
    status = Path(f"/proc/{launched.process.pid}/status")
    while not _catches(status, signal.SIGTERM):
        time.sleep(0.01)
    launched.stop()
    result = launched.end()
    assert (result.exit_code, result.out) == (143, "")
    assert result.message["reason"] == "Stopped"


def _catches(status: Path, number: int) -> bool:
    mask = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def test_names_a_working_directory_that_is_missing(launcher: Launcher) -> None:
    result = launcher.run("true", TORCHRUN_WORKING_DIR="/no/such/place")
    assert result.exit_code == 125
    assert result.message["reason"] == "WorkingDirMissing"
    assert "/no/such/place" in str(result.message["message"])


def test_copying_keeps_modes_and_refuses_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for mode in (0o644, 0o755, 0o444):
        (source / f"{mode:o}").touch(mode)
        (source / f"{mode:o}").chmod(mode)
    copy_tree(str(source), str(tmp_path / "target"))
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "target").iterdir()
    }
    assert modes == {"644": 0o644, "755": 0o755, "444": 0o644}
    (source / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="neither a file nor a directory"):
        copy_tree(str(source), str(tmp_path / "again"))


def test_waits_for_names_and_gives_up(launcher: Launcher) -> None:
    here = socket.gethostname()
    assert launcher.run("true", MASTER_ADDR="127.0.0.1").exit_code == 0
    assert launcher.run("true", PET_RDZV_ENDPOINT="localhost:29500").exit_code == 0, here
    result = launcher.run(
        "true", PET_RDZV_ENDPOINT="no-such-host.invalid:29500", TORCHRUN_RESOLVE_WAIT_SECONDS="0.2"
    )
    assert result.exit_code == 125
    assert result.message["reason"] == "MasterNotResolved"
    assert "no-such-host.invalid" in str(result.message["message"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHRUN_COMMAND", "not json"),
        ("TORCHRUN_COMMAND", "[]"),
        ("TORCHRUN_COMMAND", '" "'),
        ("TORCHRUN_COMMAND", "[1]"),
        ("TORCHRUN_LAUNCHER", "mpirun"),
        ("TORCHRUN_SYNC_WAIT_SECONDS", "soon"),
        ("TORCHRUN_GRACE_SECONDS", "nan"),
    ],
)
def test_a_wrong_setting_is_one_line(launcher: Launcher, name: str, value: str) -> None:
    result = launcher.run("true", **{name: value})
    assert result.exit_code == 125
    assert result.message["reason"] == "InvalidSetting"
    assert name in result.err
    assert repr(value) in result.err
    assert len(result.err.splitlines()) == 1


def test_says_that_torch_is_missing(launcher: Launcher) -> None:
    bare = launcher.directory / "bin"
    bare.mkdir()
    (bare / "python").symlink_to(os.path.realpath(launcher.python))
    result = launcher.run("python train.py", PATH=str(bare))
    assert result.exit_code == 125
    assert result.message["reason"] == "TorchMissing"
    assert "torch is not installed in this image" in str(result.message["message"])


def annotations(file: Path, **values: str) -> None:
    """As the kubelet writes the downward API: a whole new file, moved into place."""
    fresh = file.with_suffix(".new")
    fresh.write_text("".join(f'{name}="{value}"\n' for name, value in values.items()))
    fresh.rename(file)


def test_no_rank_starts_before_the_gate_is_opened(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    annotations(file, **{"torchrun.ai/start": "1"})
    gate = {"TORCHRUN_START_FILE": str(file), "TORCHRUN_ATTEMPT": "2"}
    launched = launcher.start(f"cat {file}", **gate)
    assert launched.process.stderr
    while "the gate opens" not in launched.process.stderr.readline():
        pass
    assert launched.process.poll() is None
    annotations(file, **{"other": "x", "torchrun.ai/start": "2"})
    result = launched.end()
    assert result.exit_code == 0
    assert 'start="2"' in result.out, "the command ran after the go-ahead"


def test_an_open_gate_is_passed_without_a_word(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    annotations(file, **{"torchrun.ai/start": "0"})
    result = launcher.run("true", TORCHRUN_START_FILE=str(file), TORCHRUN_ATTEMPT="0")
    assert (result.exit_code, "gate" in result.err) == (0, False)


def test_a_pod_that_is_ended_at_the_gate_ends(launcher: Launcher, tmp_path: Path) -> None:
    launched = launcher.start("true", TORCHRUN_START_FILE=str(tmp_path / "none"))
    assert launched.process.stderr
    while "the gate opens" not in launched.process.stderr.readline():
        pass
    launched.stop()
    assert launched.end().exit_code == 143
