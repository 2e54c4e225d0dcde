"""A Docker engine of Debian's packages, started by hand where none runs.

It runs in mount and PID namespaces and in a cgroup of its own, with its images in the cache. Of the
host it changes what Docker's networks need: bridges, iptables rules and IP forwarding, all of which
`down` reverts. Needs root.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import cgroups, packages, processes
from .api import wait_until
from .artefacts import locked
from .capped_runc import missing_capabilities
from .errors import ClusterError
from .places import cache_home
from .progress import step

PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "runc": "runc",
    "iptables-save": "iptables",
    "ip": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
}
DAEMON = "dockerd"
BRIDGE = "docker0"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
TABLES = ("iptables", "ip6tables")
START_SECONDS = 60.0


class DockerEngine:
    """The engine of this cache folder. Raises ClusterError with what to do."""

    def __init__(self) -> None:
        self._folder = cache_home() / "docker"
        self._log = self._folder / "dockerd.log"
        self._before = self._folder / "before.json"
        digest = hashlib.sha256(str(self._folder).encode()).hexdigest()[:6]
        self._cgroup = f"torchrun-docker-{digest}"

    @property
    def host(self) -> str:
        """The value of DOCKER_HOST."""
        return f"unix://{self._folder / 'docker.sock'}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the engine during the block; images are kept after it.

        There is one at a time: others wait for its end. What a crash left is cleared first.
        """
        if os.geteuid() != 0:
            raise ClusterError("a Docker engine needs root; start Docker, or run this as root")
        packages.ensure(PACKAGES)
        with locked(self._folder):
            try:
                self._up()
                yield
            finally:
                self._down()

    def _up(self) -> None:
        with step("Docker engine"):
            self._clear()
            if bridges() & {BRIDGE}:
                raise ClusterError(
                    f"{BRIDGE} exists, so another Docker engine runs here: set DOCKER_HOST to it"
                )
            self._record()
            cgroups.create(self._cgroup)
            self._write_configuration()
            processes.start(self._folder, DAEMON, self._command(), self._log)
            alive = processes.alive_check(self._folder, [DAEMON], lambda _: self._log)
            wait_until(self._answers, "the Docker engine", alive, START_SECONDS)
            self._remove_all()

    def _down(self) -> None:
        try:
            if self._answers():
                self._remove_all()
        finally:
            self._clear()

    def docker(self, *arguments: str, check: bool = True) -> str:
        """Run a command of the client against this engine and return its stdout."""
        result = subprocess.run(
            ["docker", "--host", self.host, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if check and result.returncode:
            raise ClusterError(f"`docker {' '.join(arguments)}` failed: {result.stderr.strip()}")
        return result.stdout

    def _answers(self) -> bool:
        return bool(self.docker("info", "--format", "{{.ID}}", check=False).strip())

    def _remove_all(self) -> None:
        if containers := self.docker("ps", "--all", "--quiet").split():
            self.docker("rm", "--force", "--volumes", *containers)
        self.docker("volume", "prune", "--force")
        self.docker("network", "prune", "--force")

    def _write_configuration(self) -> None:
        configuration: dict[str, object] = {
            "data-root": str(self._folder / "data"),
            "exec-root": str(self._folder / "exec"),
            "pidfile": str(self._folder / "docker.pid"),
            "hosts": [self.host],
            "cgroup-parent": f"/{self._cgroup}/containers",
            "deprecated-key-path": str(self._folder / "key.json"),
        }
        if missing_capabilities(Path("/proc/self/status").read_text()):
            runtime = self._folder / "runc"
            runc = packages.find("runc")
            assert runc
            program = Path(__file__).with_name("capped_runc.py")
            line = shlex.join([sys.executable, str(program), runc])
            runtime.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            runtime.chmod(0o755)
            configuration["runtimes"] = {"capped": {"path": str(runtime)}}
            configuration["default-runtime"] = "capped"
        (self._folder / "daemon.json").write_text(json.dumps(configuration, indent=2) + "\n")

    def _command(self) -> list[str]:
        dockerd = packages.find("dockerd")
        script = f"""set -e
{cgroups.enter_script(self._cgroup)}
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
exec {dockerd} --config-file {shlex.quote(str(self._folder / "daemon.json"))}
"""
        program = self._folder / "start.sh"
        program.write_text(script)
        namespaces = ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        return [*namespaces, "env", f"PATH={packages.SEARCH_PATH}", "sh", str(program)]

    def _record(self) -> None:
        before = {
            "forwarding": FORWARDING.read_text(),
            "policies": {table: forward_policy(_rules(table)) for table in TABLES},
            "bridges": sorted(bridges()),
        }
        self._before.write_text(json.dumps(before))

    def _clear(self) -> None:
        processes.end(self._folder)
        cgroups.remove(self._cgroup)
        # Sockets, and what was mounted in the namespace that has gone.
        shutil.rmtree(self._folder / "exec", ignore_errors=True)
        for name in ("docker.sock", "docker.pid"):
            (self._folder / name).unlink(missing_ok=True)
        if not self._before.exists():
            return
        before = json.loads(self._before.read_text())
        own = bridges() - set(before["bridges"])
        for bridge in own:
            subprocess.run(["ip", "link", "delete", bridge], check=True)
        for table in TABLES:
            _restore(table, without_docker(_rules(table), own, before["policies"][table]))
        FORWARDING.write_text(before["forwarding"])
        self._before.unlink()


def bridges() -> set[str]:
    """Names of the bridges in this network namespace."""
    return {path.parent.name for path in Path("/sys/class/net").glob("*/bridge")}


def forward_policy(rules: str) -> str:
    """The policy of the chain FORWARD in the output of iptables-save; ACCEPT is the default."""
    for line in rules.splitlines():
        if line.startswith(":FORWARD "):
            return line.split()[1]
    return "ACCEPT"


def without_docker(rules: str, own: set[str], policy: str) -> str:
    """The output of iptables-save without Docker's chains and rules, for iptables-restore.

    `own` are Docker's bridges, `policy` becomes that of FORWARD in the table filter.
    """
    lines: list[str] = []
    table = ""
    for line in rules.splitlines():
        if line.startswith("*"):
            table = line
        words = line.split()
        if any(word.lstrip(":").startswith("DOCKER") or word in own for word in words):
            continue
        # Masquerading names the network's addresses and a bridge after "!".
        if line.startswith(":FORWARD ") and table == "*filter":
            words[1] = policy
            line = " ".join(words)
        lines.append(line)
    return "\n".join([*lines, ""])


def _rules(table: str) -> str:
    saved = subprocess.run([_find(f"{table}-save")], capture_output=True, text=True, check=False)
    return saved.stdout


def _restore(table: str, rules: str) -> None:
    subprocess.run([_find(f"{table}-restore")], input=rules, text=True, check=True)


def _find(program: str) -> str:
    path = packages.find(program)
    if path is None:
        raise ClusterError(f"{program} is missing")
    return path
