"""Commands with a Docker engine, and what such an engine changes on the host."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "cluster")}


def cluster_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torchrun_cluster", *arguments]


def with_docker(script: str, *options: str) -> str:
    """Run a shell script whose `docker` reaches an engine, and return its stdout.

    `options` are those of with-docker.
    """
    process = subprocess.Popen(
        cluster_command("with-docker", *options, "sh", "-euc", script),
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate()
    except KeyboardInterrupt:
        # It gets the Ctrl-C, too, and ends the engine.
        process.communicate()
        raise
    assert process.returncode == 0, output + errors
    return output


def host() -> list[str]:
    """What of the host an engine changes: interfaces, rules, mounts, cgroups, forwarding."""
    rules = [
        subprocess.run([f"{table}-save"], capture_output=True, text=True, check=False).stdout
        for table in ("iptables", "ip6tables")
    ]
    docker_rules = [line for text in rules for line in text.splitlines() if "ocker" in line]
    return [
        *sorted(path.name for path in Path("/sys/class/net").iterdir()),
        *docker_rules,
        *sorted(
            line.split()[4]
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if "docker" in line
        ),
        *sorted(str(path) for path in Path("/sys/fs/cgroup").glob("*/torchrun-docker-*")),
        Path("/proc/sys/net/ipv4/ip_forward").read_text(),
    ]
