"""The ranks of real pods: one is killed, and those of all nodes restart in the same pods."""

import json

from e2e.space import Space
from torchrun_api import names
from torchrun_api.json import JsonValue

ROUNDS: JsonValue = [
    "sh",
    "-c",
    """echo "round $TORCHRUN_ROUND"
    if [ "$TORCHRUN_ROUND" -gt 0 ]; then cat /dev/shm/state; sleep 5; exit; fi
    echo "state of node $NODE_RANK" >/dev/shm/state
    exec python3 -c 'import time; time.sleep(600)'""",
]
"""Round 0 hangs until a rank is killed. Later rounds find what it left in memory, and succeed."""


def pod_of(space: Space, name: str, index: int) -> str:
    """The name of the newest pod of one node of a job."""
    selector = f"{names.JOB_LABEL}={name},{names.COMPLETION_INDEX_LABEL}={index}"
    listed = json.loads(space.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
    return str(listed[-1]["metadata"]["name"])


def kill_rank(space: Space, pod: str) -> None:
    """Kill the user's process with SIGKILL from inside its container."""
    script = (
        "import os, signal, time\n"
        "deadline, killed = time.monotonic() + 60, 0\n"
        # The pod is Running before its launcher has started the command.
        "while not killed and time.monotonic() < deadline:\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        try:\n"
        "            line = open(f'/proc/{pid}/cmdline').read()\n"
        "            if 'time.sleep' in line and 'launch' not in line:\n"
        "                killed += 1\n"
        "                print('killed', pid, flush=True)\n"  # the container may end at once
        "                os.kill(int(pid), signal.SIGKILL)\n"
        "        except OSError:\n"  # the process has ended meanwhile
        "            pass\n"
        "    time.sleep(0 if killed else 0.1)\n"
    )
    # By stdin, because the search would match the script in its own command line.
    inside = ("exec", "-i", pod, "-c", "trainer", "--", "python3", "-")
    # The container ends with its rank, and with it the exec process.
    output = space.kubectl(*inside, stdin=script, check=False)
    assert "killed" in output, output
