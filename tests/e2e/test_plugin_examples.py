"""The examples of the plugin's help that need pods, unchanged. The others run in tests/integration.

Programs that they call in the pod (nvidia-smi, py-spy, TensorBoard) are replaced by scripts.
"""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.manifests import queue
from e2e.space import Space, until
from e2e.test_plugin import SECONDS, plugin, project
from e2e.test_plugin_pods import answers
from integration.test_plugin_examples import EXAMPLES, JOB, NEED_PODS
from torchrun_api.kinds.resources import TORCHRUN_JOBS

# Two processes for each node, so rank 3 is on node 1. It ends the first gang.
TRAIN = """
import http.server, os, pathlib, sys, threading, time
node = os.environ["NODE_RANK"]
tools = pathlib.Path("/tmp/bin")
tools.mkdir(exist_ok=True)
serve = "import http.server as h, sys; h.HTTPServer(('', int({port})), h.SimpleHTTPRequestHandler)"
for name, body in {
    "nvidia-smi": "print('a GPU of node', " + node + ")",
    "py-spy": "import sys; print(*sys.argv[1:], 'on node', " + node + ")",
    "tensorboard": serve.format(port="[w for w in sys.argv if w.startswith('--port=')][0][7:]")
    + ".serve_forever()",
}.items():
    (tools / name).write_text("#!" + sys.executable + "\\n" + body + "\\n")
    (tools / name).chmod(0o755)
seen = pathlib.Path(os.environ["TORCHRUN_STATE_DIR"], "seen-" + node)
first = not seen.exists()
seen.touch()
print(f"[default0]:loss of node {node}", flush=True)
print(f"[default1]:first {first}", flush=True)
time.sleep(1)
if first and node == "1":
    sys.exit(3)
if first:
    time.sleep(600)
server = http.server.HTTPServer(("", 8000), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not pathlib.Path("/tmp/stop").exists():
    time.sleep(0.2)
"""


@contextmanager
def example(space: Space, directory: Path, line: str) -> Iterator[subprocess.Popen[str]]:
    """Start the line in a shell, with the namespace of the test."""
    config = json.loads(
        space.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json").stdout
    )
    for context in config["contexts"]:
        context["context"]["namespace"] = space.name
    (directory / "config").write_text(json.dumps(config))
    with subprocess.Popen(
        ["bash", "-c", f"exec {line}" if "|" not in line else line],
        cwd=directory,
        env={**space.cluster.environment, "KUBECONFIG": str(directory / "config")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def runs(space: Space, directory: Path, line: str) -> str:
    with example(space, directory, line) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, f"{line}\n{out}{err}"
    return out


@pytest.mark.long
def test_the_examples_that_need_pods_work_unchanged(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py=TRAIN)
    spec = {
        "distributed": {"backend": "gloo", "nprocPerNode": 2},
        "reliability": {"restartScope": "Gang"},
    }
    space.apply(queue("two", space.cluster.controller, **spec))
    path = "PATH=/tmp/bin:/usr/local/bin:/usr/bin:/bin:/opt/venv/bin"
    arguments = ["--queue", "two", "--nodes", "2", "--name", JOB, "-e", path, "--no-follow"]
    code, _, err = plugin(space, tmp_path, "submit", *arguments, "exec python3 train.py")
    assert code == 0, err
    until(lambda: space.get(TORCHRUN_JOBS, JOB)["status"].get("attempt") == 1, "the restart")
    space.wait_phase(JOB, "Running")
    elsewhere = ("--local", " selftest ")  # tests/e2e/test_selftest.py
    left = [
        line
        for line in EXAMPLES
        if line.split()[2] in NEED_PODS and not any(words in line for words in elsewhere)
    ]

    def take(words: str, command: str = "") -> str:
        asked = [line for line in left if command in ("", line.split()[2])]
        found = [line for line in asked if line.partition(JOB)[2].strip() == words]
        assert len(found) == 1, (words, left)
        left.remove(found[0])
        return found[0]

    def run(words: str, command: str = "") -> str:
        return runs(space, tmp_path, take(words, command))

    before = run("--previous --rank 3")
    assert "[1] [default1]:first True" in before
    assert "[default0]" not in before
    assert "[0] [default1]:first False" in run("--node 0 --tail 100")
    lines = run("--since 10m --timestamps --no-prefix | grep loss")
    assert lines.count("Z [default0]:loss of node") == 2
    run("", "exec")  # a shell ends with its input
    assert "train.py" in run("", "stacks")
    assert len(json.loads(run("-o json", "stacks"))["processes"]) >= 4
    assert "(Pdb) " in run("--rank 3 --pdb", "debug")  # the end of its input detaches
    with example(space, tmp_path, take("--rank 3", "debug")) as process:
        assert process.stderr is not None
        first = process.stderr.readline()  # its image may have debugpy or not
        assert first.startswith(("Rank 3 (node 1,", "Error: Rank 3 cannot import debugpy")), first
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
    with example(space, tmp_path, take("", "checkpoint")) as process:  # this script makes no calls
        _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, "not every rank has called" in err) == (1, True)
    assert "first True" in run("logs/0/node-0.log", "state-files")
    assert "logs/0/node-1.log" in run("", "state-files")
    assert "logs/0/node-1.log\n" in run("-o name", "state-files")
    with example(space, tmp_path, take("--container setup")) as process:  # this job has no setup
        _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, "has no pod whose setup container has started" in err) == (2, True)
    assert run("--node 1 -- nvidia-smi") == "a GPU of node 1\n"
    assert run("--rank 3 -- py-spy dump --subprocesses --pid 1") == (
        "dump --subprocesses --pid 1 on node 1\n"
    )
    for words, port in (
        ("8000", 8000),
        ("--tensorboard /checkpoints/runs", 6006),
        ("--tensorboard /app/runs 6007:6006", 6007),
    ):
        with example(space, tmp_path, take(words)) as process:
            until(lambda port=port: answers(port), "an answer")
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)
    with example(space, tmp_path, take("--follow")) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[")
        for node in ("0", "1"):
            # The shell gets the namespace that the helper appends as $0 and $1.
            words = [JOB, "-n", space.name, "--node", node, "--", "sh", "-c", "touch /tmp/stop"]
            code, _, err = plugin(space, tmp_path, "exec", *words)
            assert code == 0, err
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0
    assert not left
