"""The launcher as a process: exit codes, settings and termination messages."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unit.runtime.launching import FOLDER, PYTHONS, Launcher, changed, script


def test_success_writes_no_termination_message(launcher: Launcher) -> None:
    result = launcher.run("echo $((6 * 7)); true")
    assert (result.exit_code, result.out, result.message) == (0, "42\n", {})


def test_runs_as_a_folder_beside_any_other_files(tmp_path: Path) -> None:
    copy = changed(Launcher(PYTHONS[0], tmp_path), {})
    (tmp_path / "json.py").write_text("raise ImportError('not this one')")
    result = copy.run("exit 5")
    assert result.exit_code == 5, result.err


OLD = [path for name in ("python3.7", "python3.6") if (path := shutil.which(name))]
PRETEND = """
import runpy, sys
sys.version_info = (3, 7, 16, "final", 0)
runpy.run_path({!r}, run_name="__main__")
"""


@pytest.mark.parametrize("python", [*OLD, ""], ids=lambda path: Path(path).name or "pretended")
def test_an_old_python_is_reported(python: str, tmp_path: Path) -> None:
    if python and subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip(f"{python} does not start here")
    log = tmp_path / "termination-log"
    log.touch()
    argv = [python, str(FOLDER)] if python else [sys.executable, "-c", PRETEND.format(str(FOLDER))]
    environment = {**os.environ, "TORCHRUN_TERMINATION_LOG": str(log), "TORCHRUN_COMMAND": '"true"'}
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True)
    message = json.loads(log.read_text())
    assert (ended.returncode, message["exitCode"], message["reason"]) == (78, 78, "PythonTooOld")
    assert "needs Python 3.8 or later" in message["message"]
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
        ("true && no-such-program x", 127, None, "ExitCode"),
        ("no-such-program x", 127, None, "CommandNotFound"),
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


def test_reports_the_exception_that_ended_a_python_program(launcher: Launcher) -> None:
    name = script(launcher.directory, "raise ValueError('bad batch')")
    result = launcher.run(f"{launcher.python} {name}", TORCHRUN_LAUNCHER="none")
    assert result.exit_code == 1
    assert result.message["message"] == "ValueError: bad batch"
    assert "Traceback" in result.err


# Prints which of the Pythons of a rank are nested, and of a wrapper without a rank.
NESTED = """
import json, os, subprocess, sys
depth = int(sys.argv[1])
def run(*argv, **more):
    subprocess.call([sys.executable, *argv], env={**os.environ, **more}, stderr=-3)
if depth == 1:
    run(__file__, "2")  # of the same kind
    run(__file__, "2", RANK="0")  # a rank, whose parent is torchrun
if depth == 2:
    os.execv(sys.executable, [sys.executable, __file__, "3"])
if depth == 3 and "RANK" in os.environ:
    run("-c", "raise KeyError('child')")
if depth > 1:
    raise KeyError("rank" if "RANK" in os.environ else "script")
folder = os.environ["TORCHRUN_LAUNCH_REPORTS"]
names = [name for name in os.listdir(folder) if name.endswith(".json")]
reports = [json.load(open(os.path.join(folder, name))) for name in names]
print(*sorted(report["message"] + str(report["nested"]) for report in reports), sep="\\n")
"""


def test_a_report_says_whether_another_python_of_the_rank_started_the_process(
    launcher: Launcher,
) -> None:
    name = script(launcher.directory, NESTED)
    result = launcher.run([launcher.python, name, "1"], TORCHRUN_LAUNCHER="none")
    assert result.out.splitlines() == [
        "KeyError: 'child'True",
        "KeyError: 'rank'False",
        "KeyError: 'script'True",
    ]


AGENT = """
import atexit
class Failure:
    pid, exitcode, timestamp, message = 12, -9, 1767225600, "killed"
class ChildFailedError(Exception):
    failures = {3: Failure}
atexit.register(lambda: print("unloads torch"))
print("last words", end="")
raise ChildFailedError
"""


def test_torchrun_exits_once_it_has_reported_the_failed_ranks(launcher: Launcher) -> None:
    (launcher.directory / "agent.py").write_text(AGENT)
    result = launcher.run([launcher.python, "agent.py"], TORCHRUN_LAUNCHER="none")
    assert (result.exit_code, result.out) == (137, "last words")
    assert (result.message["rank"], result.message["signal"]) == (3, 9)
    assert "ChildFailedError" in result.err, "as Python writes it"


# As in an image that adds folders of packages.
SITECUSTOMIZE = """
import site, sys
sys.marked = 'by the image'
site.addsitedir({packages!r})
sys.path.insert(0, {first!r})
"""
USES_IT = """
import os, sys, extra, torchrun_progress
print(sys.marked, extra.value, *map(os.path.basename, sys.path[1:3]))
raise KeyError('k')
"""


def test_runs_the_sitecustomize_that_it_hides(launcher: Launcher) -> None:
    own, packages, first = (launcher.directory / name for name in ("own", "packages", "first"))
    for folder in (own, packages, first):
        folder.mkdir()
    script(own, SITECUSTOMIZE.format(packages=str(packages), first=str(first)), "sitecustomize.py")
    script(packages, "value = 'of a package'", "extra.py")
    command = [launcher.python, "-c", USES_IT]
    result = launcher.run(command, TORCHRUN_LAUNCHER="none", PYTHONPATH=str(own))
    assert result.out == "by the image of a package rank first\n"
    assert result.message["message"] == "KeyError: 'k'"


def test_works_on_a_read_only_file_system(launcher: Launcher) -> None:
    result = launcher.run("exit 3", TORCHRUN_TERMINATION_LOG="/proc/none", TMPDIR="/proc")
    assert result.exit_code == 3
    assert result.message == {}


def test_creates_no_termination_log_of_its_own(launcher: Launcher) -> None:
    path = launcher.directory / "none"
    assert launcher.run("exit 3", TORCHRUN_TERMINATION_LOG=str(path)).exit_code == 3
    assert not path.exists()


def test_output_is_unbuffered_by_default(launcher: Launcher) -> None:
    assert launcher.run("echo $PYTHONUNBUFFERED").out == "1\n"
    assert launcher.run("echo $PYTHONUNBUFFERED;", PYTHONUNBUFFERED="").out == "\n"


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


def test_reports_that_torch_is_missing(launcher: Launcher) -> None:
    bare = launcher.directory / "bin"
    bare.mkdir()
    (bare / "python").symlink_to(os.path.realpath(launcher.python))
    result = launcher.run("python train.py", PATH=str(bare))
    assert result.exit_code == 125
    assert result.message["reason"] == "TorchMissing"
    assert "The image has no torch" in str(result.message["message"])


REQUESTED = """
import sys
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch import supervise as module
from torchrun_runtime.launch.supervise import SupervisedCommand, StopRequest, supervise

send, calls = module.send, []

def send_late(processes, number):  # the kernel holds the process for a moment
    calls.append(number)
    if len(calls) > 1:
        send(processes, number)

module.send = send_late

class Hung:
    asked = False

    def check(self):
        self.asked = True
        return StopRequest(124, "Hung", "no output")

    def on_stop(self, *, leaving):
        pass

hung = Hung()
end = supervise(
    SupervisedCommand(["sleep", "1000"], {{}}), 5.0, [hung], lambda: 5.0 if hung.asked else None
)
print(end.stop_request.reason, end.for_next_round)
"""


def test_the_end_of_a_round_does_not_replace_the_request_of_a_watchdog() -> None:
    script = REQUESTED.format(runtime=str(FOLDER.parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "Hung False\n"
    assert "killing the command: " in done.stderr


ROUND = """
import sys, time
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch import supervise as module
from torchrun_runtime.launch.supervise import SupervisedCommand, supervise

class Counting:
    times, stops = [], []

    def check(self):
        self.times.append(time.monotonic())

    def on_stop(self, *, leaving):
        self.stops.append(leaving)

module._CLEAR_SECONDS = 60.0
watchdog, start = Counting(), time.monotonic()
end = supervise(
    SupervisedCommand(["sleep", "1000"], {{}}), 5.0, [watchdog],
    lambda: 5.0 if watchdog.times[2:] else None
)
pauses = [later - earlier for earlier, later in zip(watchdog.times, watchdog.times[1:])]
print(end.for_next_round, watchdog.stops, min(pauses) > 0.5, time.monotonic() - start < 60)
"""


def test_watchdogs_look_once_a_second_and_learn_of_the_end_of_a_round() -> None:
    script = ROUND.format(runtime=str(FOLDER.parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True [False] True True\n"


NEXT_ROUND = """
import os, signal, subprocess, sys
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch import supervise as module
from torchrun_runtime.launch.supervise import SupervisedCommand, supervise

if sys.argv[1:]:
    signal.signal(signal.SIGTERM, lambda *_: print("the agent has got SIGTERM", flush=True))
    # The rank itself reports that it runs: its environment is empty during its exec.
    program = "import os, signal; os.write(1, b'ready'); signal.pause()"
    rank = subprocess.Popen([sys.executable, "-c", program], env={{**os.environ, "LOCAL_RANK": "0"}})
    rank.wait()
    while True: signal.pause()
module._AGENT_SECONDS = 1000.0
reads, writes = os.pipe()
agent = ["sh", "-c", f'exec "$@" >&{{writes}}', "sh", sys.executable, {script!r}, "agent"]
os.set_inheritable(writes, True)
output = []

def await_agent():
    if not output:
        output.append(os.read(reads, 99))
    return 1000.0

end = supervise(SupervisedCommand(agent, os.environ), 1000.0, [], await_agent)
os.close(writes)
print(end.for_next_round, output + [os.read(reads, 99)])
"""


def test_the_agent_of_ranks_that_end_for_the_next_round_gets_no_signal_but_sigkill(
    tmp_path: Path,
) -> None:
    path = tmp_path / "script.py"
    path.write_text(NEXT_ROUND.format(runtime=str(FOLDER.parents[1]), script=str(path)))
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "True [b'ready', b'']\n"


SAVES = """
import os, signal, sys
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch.supervise import SupervisedCommand, supervise

ends = "touch asked; until [ -e seen ]; do sleep 0.05; done; exit 3"
command = f"trap '{{ends}}' TERM; touch runs; while :; do sleep 0.05; done"

def observe():
    if os.path.exists("asked"):
        open("seen", "w").close()
    elif os.path.exists("runs"):
        os.kill(os.getpid(), signal.SIGTERM)

print(supervise(SupervisedCommand(["sh", "-c", command], os.environ), 1000.0, observe=observe).exit_code)
"""


def test_what_the_ranks_save_is_seen_before_a_command_that_was_asked_to_end_has_ended(
    tmp_path: Path,
) -> None:
    script = SAVES.format(runtime=str(FOLDER.parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "3\n"
