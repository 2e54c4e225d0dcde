"""What users type: `kubectl torchrun run --local` with real launchers and commands.

A row of CASES is a directory, a command and what must come out; add one for each new input. Rows
with `torch` need a Python that has it, in TORCHRUN_TEST_TORCH_PYTHON (see `make recipes`). The others
must not look like one python command, which runs under torchrun: hence `true &&`.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("api", "controller", "runtime", "plugin")
TORCH = os.environ.get("TORCHRUN_TEST_TORCH_PYTHON", "")
LIMIT = 240  # seconds of one run on a busy machine

SAY = 'import os; print("rank", os.environ.get("RANK"), "of node", os.environ["NODE_RANK"])\n'
FAIL_ON_NODE_1 = """\
import os, time
print("round", os.environ["TORCHRUN_ROUND"], flush=True)
if os.environ["NODE_RANK"] == "1" and os.environ["TORCHRUN_ROUND"] == "0":
    raise ValueError("bad batch")
"""
# A new gang has another directory, as new pods have.
FAIL_ONCE = """\
import os, time
time.sleep(1)
if os.environ["TORCHRUN_ATTEMPT"] == os.environ["TORCHRUN_ROUND"] == "0":
    raise OSError("the object store did not answer")
print("trained")
"""
ALWAYS_FAIL = 'raise ValueError("bad batch")\n'
DDP = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), flush=True)
dist.destroy_process_group()
"""
UNEVEN = """\
import os, time
rank = int(os.environ["RANK"])
time.sleep(12 * rank)
print("rank", rank, "is done", flush=True)
"""
# Node 0 is the first one to look for a store, and would have it.
LATE_TORCHRUN = "sleep $((4 * NODE_RANK)); torchrun train.py"
# The agent of a node whose ranks have ended does not wait for five minutes.
NO_EXIT_BARRIER = """\
import importlib.machinery, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.distributed.elastic.agent.server.api":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.SimpleElasticAgent._exit_barrier = lambda self: None
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""
STORE = """\
import os, pathlib
folder = pathlib.Path(os.environ["TORCHRUN_CHECKPOINT_DIR"])
print("kept" if (folder / "step").exists() else "new", flush=True)
(folder / "step").write_text("1")
"""


NOTE = """\
error = ValueError("loss is NaN")
error.add_note("while reading shard 3: connection reset by peer")
raise error
"""
HOOK = """\
import sys
sys.excepthook = lambda kind, value, traceback: print("something went wrong", file=sys.stderr)
raise FileNotFoundError("/data/train.bin")
"""
HANDLED = """\
import sys, traceback
try:
    raise KeyError("lr")
except KeyError:
    traceback.print_exc()
    sys.exit(1)
"""
FAILURES = """\
class CheckpointException(Exception):
    failures = {3: OSError("no space")}
import atexit
atexit.register(print, "cleaned up")
raise CheckpointException("rank 3 cannot save")
"""


# A package with the names of torch, so that these rows need none. `group`: the script forms one.
TORCH_FILES = {
    "lib/torch/__init__.py": "from torch import _C\n",
    "lib/torch/_C.py": "",
    "lib/torch/distributed/__init__.py": "from .distributed_c10d import *\n",
    "lib/torch/distributed/distributed_c10d.py": "def init_process_group(backend): pass\n",
    "alone.py": "import torch; print('trained')\n",
    "group.py": "import torch.distributed as d; d.init_process_group('gloo'); print('trained')\n",
    "look.py": "import importlib.util as i; i.find_spec('torch'); print('trained')\n",
}
WITH_TORCH = ("-e", "PYTHONPATH=lib")


@dataclass(frozen=True)
class Case:
    """One run. `out`, `err`: texts that stdout and stderr have; `absent`: neither has them."""

    name: str
    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ("--nodes", "2")
    code: int = 0
    out: Sequence[str] = ()
    err: Sequence[str] = ("Succeeded",)
    absent: Sequence[str] = ()
    torch: bool = False
    no_torch: bool = False


JOB = """\
apiVersion: torchrun.ai/v1alpha1
kind: TorchrunJob
metadata: {name: from-file}
spec:
  jobQueue: h100
  numNodes: 2
  priority: 5
  command: ["python3", "say.py"]
  launcher: none
"""
SAY_LIST, RUN_LIST = '["python3", "say.py"]', '["./run.sh"]'
SETUP = "  setupCommand: echo made once > $TORCHRUN_ENV_DIR/made\n"
NEVER = "  reliability: {restartPolicy: Never}\n"
ALONE = "each one trained alone. Write the command as python train.py"


# Stops its helper at the end.
ENDS_ITS_GROUP = """\
#!/bin/bash
trap 'trap "" TERM; kill 0; wait' EXIT
sleep 1000 &
"""


def once(command: str) -> dict[str, str]:
    """A job that runs a shell line without torchrun and without a restart."""
    return {"fail.py": ALWAYS_FAIL, "job.yaml": JOB.replace(SAY_LIST, json.dumps(command)) + NEVER}


CASES = (
    Case("two nodes", "true && python3 say.py", {"say.py": SAY}, out=("of node 0", "of node 1")),
    Case(
        "a shell line without torch",
        "cd src && exec python3 say.py | tee log",
        {"src/say.py": SAY},
        out=("its Python cannot import torch", "of node 1"),
        no_torch=True,
    ),
    Case(
        "a file, with a field of clusters",
        "",
        {"say.py": SAY, "job.yaml": JOB},
        ("-f", "job.yaml"),
        out=("of node 1",),
        err=("Not used on this machine: spec.priority.", "Succeeded"),
    ),
    Case(
        "a restart in the same pods",
        "true && python3 fail.py",
        {"fail.py": FAIL_ON_NODE_1},
        out=("ValueError: bad batch", "round 1"),
        err=("1 restart in the same pods", "Succeeded"),
    ),
    Case(
        "what a killed round has left",
        "mkdir out$TORCHRUN_ATTEMPT$NODE_RANK && python3 fail.py",
        {"fail.py": FAIL_ONCE},
        out=("File exists", "trained"),
        err=("Attempt 0 ended: Pod project", "OSError: the object store did not", "Succeeded"),
        absent=("ExitCode", "was deleted"),
    ),
    Case(
        "no restart",
        "",
        {
            "fail.py": ALWAYS_FAIL,
            "job.yaml": JOB.replace("say.py", "fail.py")
            + "  reliability: {restartPolicy: Never}\n",
        },
        ("-f", "job.yaml"),
        code=1,
        err=("ValueError: bad batch", "Failed"),
    ),
    Case(
        "a program that does not exist",
        "",
        {"job.yaml": JOB.replace("python3", "no-such-program") + NEVER},
        ("-f", "job.yaml"),
        code=1,
        err=("no-such-program", "Failed"),
    ),
    Case(
        "a program with another name",
        "pyhton say.py",
        {"say.py": SAY},
        code=1,
        err=("Did you mean python?", "Failed"),
        absent=("round 1",),
    ),
    *(
        Case(name, command, {"src/say.py": SAY}, code=1, err=err, absent=("round 1",), torch=True)
        for name, command, err in (
            ("a script in another directory", "python3 say.py", ("Did you mean src/say.py?",)),
            ("a script with another name", "python3 src/sya.py", ("Did you mean src/say.py?",)),
        )
    ),
    *(
        Case(name, "", {"say.py": script, "job.yaml": JOB + NEVER}, ("-f", "job.yaml"), 1, out, err)
        for name, script, out, err in (
            ("an exception with a note", NOTE, (), (": ValueError: loss is NaN (",)),
            ("a replaced excepthook", HOOK, (), ("FileNotFoundError: /data/train.bin",)),
            ("a handled exception", HANDLED, (), ("KeyError: 'lr'",)),
            ("failures of others", FAILURES, ("cleaned up",), ("CheckpointException: rank 3",)),
        )
    ),
    Case(
        "a script with Windows line endings",
        "",
        {
            "run.sh": "#!/bin/bash\r\necho hello\r\n",
            "job.yaml": JOB.replace(SAY_LIST, RUN_LIST) + NEVER,
        },
        ("-f", "job.yaml"),
        code=1,
        err=("Windows line endings (CRLF)",),
    ),
    Case(
        "a script whose interpreter is missing",
        "",
        {"run.sh": "#!/opt/no-such-shell\n", "job.yaml": JOB.replace(SAY_LIST, RUN_LIST) + NEVER},
        ("-f", "job.yaml"),
        code=1,
        err=("needs the interpreter /opt/no-such-shell",),
    ),
    Case(
        "a setup command",
        "",
        {
            "say.py": 'import os; print(open(os.environ["TORCHRUN_ENV_DIR"] + "/made").read())',
            "job.yaml": JOB + SETUP,
        },
        ("-f", "job.yaml"),
        out=("made once",),
    ),
    Case(
        "a generated name",
        "",
        {"say.py": SAY, "job.yaml": JOB.replace("{name: from-file}", "{generateName: try-}")},
        ("-f", "job.yaml"),
        out=("of node 1",),
    ),
    *(
        Case(
            f"success of {command!r}",
            command,
            TORCH_FILES,
            ("--nodes", nodes, *WITH_TORCH),
            code,
            ("trained",),
            err,
        )
        for nodes, command, code, err in (
            ("2", "sh -c 'python3 alone.py'", 1, ("NotDistributed", ALONE)),
            ("2", "sh -c 'python3 group.py'", 0, ("Succeeded",)),
            ("2", "sh -c 'WORLD_SIZE=2 python3 alone.py'", 0, ("Succeeded",)),
            ("2", "test $NODE_RANK = 0 && python3 group.py; python3 alone.py", 0, ("Succeeded",)),
            ("2", "sh -c 'python3 look.py'", 0, ("Succeeded",)),
            ("1", "sh -c 'python3 alone.py'", 0, ("Succeeded",)),
        )
    ),
    Case(
        "each node alone, as accepted",
        "",
        {**TORCH_FILES, **once("PYTHONPATH=lib:$PYTHONPATH python3 alone.py")},
        ("-f", "job.yaml"),
        out=("trained",),
    ),
    *(
        Case(f"failure in {command!r}", "", once(command), ("-f", "job.yaml"), 1, (), err)
        for command, err in (
            ("python3 fail.py | cat", ("Exception", "bad batch")),
            ("python3 fail.py; date", ("Exception", "bad batch")),
            (
                "nohup python3 -c 'import time; time.sleep(600)' &",
                ("LeftInBackground", "Remove nohup and &"),
            ),
        )
    ),
    *(
        Case(f"no failure in {command!r}", "", once(command), ("-f", "job.yaml"))
        for command in (
            "python3 fail.py || true",
            "python3 fail.py; python3 -c 'print(1)'",
            "python3 -c 'import time; time.sleep(600)' & sleep 1; python3 -c 'print(1)'",
            "python3 -c 'while 1: print(1)' | head -1",
        )
    ),
    *(
        Case(f"SIGTERM from inside, by {command!r}", command, {"run.sh": ENDS_ITS_GROUP}, ())
        for command in ("bash run.sh", "./run.sh", "python3 -V; kill $PPID; sleep 0.2; python3 -V")
    ),
    Case("a variable", "exec sh -c 'echo LR is $LR'", options=("-e", "LR=0.1"), out=("LR is 0.1",)),
    Case(
        "dollars",
        "exec printf '%s|' '$$' '$(HOME)' \"$X\"",
        options=("-e", "X=a$$b"),
        out=("$$|$(HOME)|a$$b|",),
    ),
    Case("a directory for checkpoints", "true && python3 s.py", {"s.py": STORE}, (), out=("new",)),
    Case(
        "torch, in a shell line",
        "cd src && X=1 exec python train.py 2>&1 | tee log",
        {"src/train.py": DDP},
        out=("sum 2",),
        torch=True,
    ),
    *(
        Case(
            f"torch, an early end of node 0, {backend}",
            "",
            {
                "train.py": UNEVEN,
                "patch/sitecustomize.py": NO_EXIT_BARRIER,
                "job.yaml": JOB.replace(SAY_LIST, LATE_TORCHRUN).replace("none", "auto")
                + f"  distributed: {{rdzvBackend: {backend}}}\n"
                + "  env: [{name: PYTHONPATH, value: patch}]\n"
                + NEVER,
            },
            ("-f", "job.yaml"),
            out=("rank 0 is done", "rank 1 is done"),
            torch=True,
        )
        for backend in ("c10d", "static")
    ),
    Case("torch", "python train.py", {"train.py": DDP}, out=("sum 2",), torch=True),
    Case(
        "torch, two ranks on each node",
        "python train.py",
        {"train.py": DDP},
        ("--nodes", "2", "--gpus-per-node", "2"),
        out=("sum 4",),
        torch=True,
    ),
)


def environment(home: Path) -> dict[str, str]:
    """The variables of a user's shell, with the Python of torch if there is one."""
    programs = [str(Path(TORCH).parent)] if TORCH else []
    return {
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in SOURCES),
        "HOME": str(home),
    }


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kubectl_torchrun", "run", "--local", *arguments]


def write_files(case: Case, directory: Path) -> None:
    """Make the directory of a row."""
    directory.mkdir()
    for name, text in case.files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, newline="")
        (directory / name).chmod(0o755)


def assert_comes_out(
    case: Case, ended: subprocess.CompletedProcess[str], unsaid: Sequence[str] = ()
) -> None:
    """Compare the end of a run with its row. unsaid: texts that this kind of run does not print."""
    shown = f"{ended.stdout}\n--- stderr\n{ended.stderr}"
    assert ended.returncode == case.code, shown
    for text in case.out:
        assert text in ended.stdout, shown
    for text in case.err:
        assert text in unsaid or text in ended.stderr, shown
    for text in ("Traceback (most recent call last):", *case.absent):
        assert text not in ended.stderr, shown


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_comes_out(case: Case, tmp_path: Path) -> None:
    if case.torch and not TORCH:
        pytest.skip("TORCHRUN_TEST_TORCH_PYTHON names no Python with torch")
    if case.no_torch and TORCH:
        pytest.skip("this Python has torch")
    directory = tmp_path / "project"
    write_files(case, directory)
    command = [case.command] if case.command else []
    ended = subprocess.run(
        command_line(*case.options, *command),
        cwd=directory,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert_comes_out(case, ended)
    assert (directory / ".torchrun" / ".gitignore").read_text() == "*\n"


LONG = """\
import os, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("code", open("version").read(), "pid", os.getpid(), flush=True)
time.sleep(3600)
"""


# Saves at the call at which all ranks stop, or a save is asked for.
STEPS = """\
import os, time, torchrun_progress
calls, node = 0, os.environ["NODE_RANK"]
print("code 1", flush=True)
while True:
    time.sleep(0.05)
    left = torchrun_progress.stopping()
    calls += 1
    if torchrun_progress.save_requested():
        print("kept", calls, flush=True)
        torchrun_progress.checkpoint(calls, f"step-{calls}")
    if left is not None:
        print("saved", calls, flush=True)
        torchrun_progress.checkpoint(calls, f"step-{calls}")
        break
"""


STARTED: "list[Running]" = []


@pytest.fixture(autouse=True)
def no_run_goes_on() -> Iterator[None]:
    """End what a failed test has left: the next test finds runs by their names."""
    yield
    while STARTED:
        process = STARTED.pop().process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT)


class Running:
    """A run of a script that ends only by a signal, and its output so far.

    with_debugpy: the script runs on the Python of the tests, which has debugpy.
    """

    def __init__(
        self, folder: Path, *options: str, script: str = LONG, with_debugpy: bool = False
    ) -> None:
        variables = environment(folder)
        if with_debugpy:
            variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
        self.directory = folder / "project"
        self.directory.mkdir()
        (self.directory / "long.py").write_text(script)
        (self.directory / "version").write_text("1")
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command_line("--nodes", "2", *options, "true && exec python3 long.py"),
                cwd=self.directory,
                env=variables,
                stdout=output,
                stderr=output,
            )
        STARTED.append(self)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str, times: int = 2) -> None:
        end = time.monotonic() + LIMIT
        while self.output.count(text) < times:
            assert time.monotonic() < end, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.05)

    def pids(self) -> list[int]:
        return [int(line.split("pid ")[1]) for line in self.output.splitlines() if "pid " in line]


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + LIMIT
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_ranks_save(number: signal.Signals, tmp_path: Path) -> None:
    run = Running(tmp_path)
    run.wait_for("code 1")
    pids = run.pids()
    run.process.send_signal(number)
    assert run.process.wait(LIMIT) == 130, run.output
    assert run.output.count("saved") == 2, run.output
    wait_until_gone(pids)


def test_all_ranks_save_at_the_same_call_on_demand_and_at_the_end(tmp_path: Path) -> None:
    run = Running(tmp_path, "--name", "steps", script=STEPS)
    run.wait_for("code 1")
    checkpoint = [sys.executable, "-m", "kubectl_torchrun", "checkpoint", "--local"]
    answers: dict[str, str] = {}
    for name, code in (("steps", 0), ("other", 1)):
        shown = subprocess.run(
            [*checkpoint, name], env=environment(tmp_path), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        answers[name] = shown.stdout + shown.stderr
        assert shown.returncode == code, answers[name]
    assert "The ranks do not save: No rank runs on this node." in answers["other"]
    run.wait_for("kept")
    kept = set(re.findall(r"kept (\d+)", run.output))
    assert len(kept) == 1
    (call,) = kept
    assert f"All ranks save at call {call} of" in answers["steps"]
    assert f"New checkpoint: step {call}, {run.directory / f'step-{call}'}" in answers["steps"]
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(LIMIT) == 130, run.output
    saved = re.findall(r"saved (\d+)", run.output)
    assert (len(saved), len(set(saved))) == (2, 1), run.output
    assert run.output.count("stopped with exit code 143: All ranks stopped at call") == 2
    assert f"The last checkpoint is of step {saved[0]} " in run.output.splitlines()[-1]


def test_no_rank_outlives_a_killed_run(tmp_path: Path) -> None:
    run = Running(tmp_path)
    run.wait_for("code 1")
    run.process.kill()
    run.process.wait(LIMIT)
    wait_until_gone(run.pids())


def test_the_stacks_of_a_run_are_printed_while_it_goes_on(tmp_path: Path) -> None:
    run = Running(tmp_path, "--name", "sleeps")
    run.wait_for("code 1")
    stacks = [sys.executable, "-m", "kubectl_torchrun", "stacks", "--local"]
    for name, code, text in (("sleeps", 0, "2 processes alike"), ("other", 2, "No process")):
        shown = subprocess.run(
            [*stacks, name], env=environment(tmp_path), capture_output=True, text=True, check=False
        )
        assert (shown.returncode, text in shown.stdout + shown.stderr) == (code, True), shown
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(LIMIT) == 130, run.output


def test_a_rank_of_a_run_is_debugged_while_it_goes_on(tmp_path: Path) -> None:
    run = Running(tmp_path, "--name", "sleeps")
    run.wait_for("code 1")
    debug = [sys.executable, "-m", "kubectl_torchrun", "debug", "--local", "sleeps"]
    for words, code, texts in (
        (["--rank", "1", "--pdb"], 0, ("Stopped rank 1 (node 1,", "(Pdb) 42", "detached")),
        (["--rank", "2", "--pdb"], 2, ("Job sleeps has no rank 2. Ranks: 0, 1.",)),
        (["--pdb", "--port", "1"], 2, ("--port is for an editor",)),
    ):
        shown = subprocess.run(
            [*debug, *words], env=environment(tmp_path), capture_output=True, text=True, check=False,
            input="p 6 * 7\nc\n",
        )  # fmt: skip
        assert shown.returncode == code, shown
        assert all(text in shown.stdout + shown.stderr for text in texts), shown
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(LIMIT) == 130, run.output


def test_an_editor_reaches_a_rank_by_a_local_port(tmp_path: Path) -> None:
    run = Running(tmp_path, "--name", "edited", with_debugpy=True)
    run.wait_for("code 1")
    body = json.dumps({"seq": 1, "type": "request", "command": "initialize",
                       "arguments": {"adapterID": "debugpy"}}).encode()  # fmt: skip
    words = ["-m", "kubectl_torchrun", "debug", "--local", "edited", "--rank", "1", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, *words], env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        found = re.match(r"Rank 1 \(node 1, pid \d+\) accepts an editor at 127.0.0.1:(\d+) ", first)
        assert found, first
        with ExitStack() as editors:  # the second one comes while the first one is connected
            for _ in range(2):
                editor = socket.create_connection(("127.0.0.1", int(found[1])), timeout=LIMIT)
                editors.enter_context(editor)
                editor.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
                assert editor.recv(15) == b"Content-Length:"
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0
        assert "Detached from rank 1. The run goes on." in process.stderr.read()
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(LIMIT) == 130, run.output


def test_an_edit_restarts_the_command(tmp_path: Path) -> None:
    run = Running(tmp_path, "--reload")
    run.wait_for("code 1")
    (run.directory / "version").write_text("2")
    run.wait_for("code 2")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(LIMIT) == 130, run.output
