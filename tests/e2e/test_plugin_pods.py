"""Plugin commands that need pods: earlier logs, exec, port-forward, doctor and Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from e2e.manifests import job, queue
from e2e.space import Space, until
from e2e.test_plugin import SECONDS, plugin, project, started
from ports import free_port
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS

TWICE = """
import os, pathlib, sys, time
rank, attempt = os.environ["NODE_RANK"], os.environ.get("TORCHRUN_ATTEMPT", "?")
seen = pathlib.Path(os.environ["TORCHRUN_STATE_DIR"], f"seen-{rank}")
first = not seen.exists()
seen.touch()
print("first words of node" if first else "second words of node", rank, flush=True)
time.sleep(1)
if first and rank == "1":
    sys.exit(3)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.long
def test_previous_logs_come_from_a_worker_and_later_from_the_claim(
    space: Space, tmp_path: Path
) -> None:
    project(tmp_path, train_py=TWICE)
    gang = {"restartScope": "Gang"}
    space.apply(queue("plain", space.cluster.controller, reliability=gang))
    arguments = ["--nodes", "2", "--name", "run", "--wait=Running", "exec python3 train.py 20"]
    code, _, err = plugin(space, tmp_path, "submit", *arguments)
    assert code == 0, err
    until(lambda: space.get(TORCHRUN_JOBS, "run")["status"].get("attempt") == 1, "the restart")
    space.wait_phase("run", "Running")
    code, out, err = plugin(space, tmp_path, "logs", "run", "--previous")
    assert code == 0, err
    assert "[1] first words of node 1" in out
    assert "[0] first words of node 0" in out, err
    assert "log-reader" not in err
    inside = ["sh", "-c", "echo inside $NODE_RANK; exit 7"]  # the helper's arguments are $0 and $1
    arguments = ["exec", "run", "--node", "1", "-n", space.name, "--", *inside]
    code, out, err = plugin(space, tmp_path, *arguments)
    assert (code, out) == (7, "inside 1\n"), err
    space.wait_phase("run", "Succeeded")
    space.kubectl(
        "delete", "pods", "-l", "torchrun-job-name=run,app.kubernetes.io/component=worker"
    )
    code, out, err = plugin(space, tmp_path, "logs", "run", "--attempt", "0", "--node", "0")
    assert code == 0, err
    assert out == "[0] first words of node 0\n" or "[0] first words of node 0" in out
    (reader,) = re.findall(r"with pod (run-log-reader-\w+)\.", err)
    until(lambda: space.api.get(PODS.path(space.name, reader)).status_code == 404, "its end")
    code, _, err = plugin(space, tmp_path, "exec", "run")
    assert code == 2
    assert "is not running. The job is Succeeded." in err


CONNECTS = "import socket; socket.create_connection(('127.0.0.1', 8123)); print('connected')"
SERVER = "exec python3 -m http.server 8123 --bind 127.0.0.1"
FAKE_BOARD = """#!/usr/bin/env python3
import http.server, sys
port = int([word for word in sys.argv if word.startswith("--port=")][0][7:])
print(sys.argv, file=sys.stderr)
http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


WAITS = """
import os, time
def odd():
    time.sleep(300)
def usual():
    time.sleep(300)
print("ready", flush=True)
odd() if os.environ["NODE_RANK"] == "1" else usual()
"""


def test_the_stacks_of_all_nodes_are_printed_while_they_run(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py=WAITS)
    space.apply(queue("plain", space.cluster.controller))
    arguments = ["--nodes", "2", "--name", "run", "--wait=Running", "exec python3 train.py"]
    code, _, err = plugin(space, tmp_path, "submit", *arguments)
    assert code == 0, err

    def is_ready() -> bool:
        return plugin(space, tmp_path, "logs", "run")[1].count("ready") == 2

    until(is_ready, "both nodes")
    code, out, err = plugin(space, tmp_path, "stacks", "run")
    assert code == 0, err
    assert "(node 0, pid " in out
    assert "(node 1, pid " in out
    assert out.count(" in odd") == out.count(" in usual") == 1, out
    space.wait_phase("run", "Running")


def test_ports_are_forwarded_and_tensorboard_ends_with_its_command(
    space: Space, tmp_path: Path
) -> None:
    board = "mkdir -p /tmp/bin && cat > /tmp/bin/tensorboard && chmod +x /tmp/bin/tensorboard"
    env = [{"name": "PATH", "value": "/tmp/bin:/usr/local/bin:/usr/bin:/bin:/opt/venv/bin"}]
    space.apply(job("web", "plain", SERVER, env=env))
    space.wait_phase("web", "Running")
    pod = space.kubectl("get", "pods", "-l", "torchrun-job-name=web", "-o",
                        "jsonpath={.items[0].metadata.name}").strip()  # fmt: skip
    inside = ("exec", pod, "-c", "trainer", "--", "python3", "-c", CONNECTS)
    # A pod is Running before its server listens, and kubectl port-forward fails without a listener.
    until(lambda: "connected" in space.kubectl(*inside, check=False), "the server in the pod")
    with started(space, tmp_path, "port-forward", "web", ":8123") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split(" -> ")[0].rpartition(":")[2])
        until(lambda: answers(port), "an answer")
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
    code, _, err = plugin(space, tmp_path, "port-forward", "web", "--tensorboard", "/tmp")
    assert code == 2
    assert "The image of the job does not contain TensorBoard." in err
    space.kubectl("exec", "-i", pod, "-c", "trainer", "--", "sh", "-c", board, stdin=FAKE_BOARD)
    port = free_port()
    arguments = ["port-forward", "web", "--tensorboard", "/tmp", str(port)]
    with started(space, tmp_path, *arguments) as process:
        until(lambda: answers(port), "an answer")
        assert process.stderr is not None
        assert f"http://localhost:{port}/" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
    listed = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    until(
        lambda: (
            "logdir" not in space.kubectl("exec", pod, "-c", "trainer", "--", "sh", "-c", listed)
        ),
        "tensorboard's end",
    )


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2):
            return True
    except OSError:
        return False


def test_doctor_reports_a_healthy_cluster(space: Space, tmp_path: Path) -> None:
    code, out, err = plugin(space, tmp_path, "doctor", "-o", "json")
    findings = json.loads(out)["findings"]
    assert code == 0, out + err
    by_subject = {finding["subject"]: finding for finding in findings}
    assert by_subject["controller"]["verdict"] == by_subject["leader"]["verdict"] == "ok"
    assert by_subject["permissions"]["verdict"] == "ok"
    space.kubectl("delete", "trq", "plain")
    assert plugin(space, tmp_path, "doctor")[0] == 1


@pytest.mark.long
def test_one_ctrl_c_detaches_and_two_delete_the_job(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py="import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    space.apply(queue("brief", space.cluster.controller))
    for name, presses in (("once", 1), ("twice", 2)):
        ours, theirs = pty.openpty()
        command = ["kubectl", "torchrun", "run", "--queue", "brief", "--name", name,
                   "exec python3 train.py", "-n", space.name]  # fmt: skip
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**space.cluster.environment, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda terminal=theirs: take_terminal(terminal),
        ) as process:
            os.close(theirs)
            screen = read_until(ours, b"up")
            for _ in range(presses):
                os.write(ours, b"\x03")
                screen += read_until(ours, b"within 5 s" if _ == 0 else b"Deleted")
            screen += read_until(ours, None)
            assert process.wait(SECONDS) == 130
        assert screen.count(b"\x1b[?25l") == screen.count(b"\x1b[?25h")
        there = space.api.get(TORCHRUN_JOBS.path(space.name, name)).status_code
        assert there == (200 if presses == 1 else 404), screen


def take_terminal(terminal: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def read_until(terminal: int, words: bytes | None) -> bytes:
    """Read until the text is shown, or with None until the program ends. Returns the output."""
    seen = b""
    while words is None or words not in seen:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            part = b""
        if not part:
            assert words is None, seen.decode(errors="replace")
            return seen
        seen += part
    return seen
