"""The rendezvous of each round: agents of two rounds never meet, and no agent has the store.

The store of a c10d rendezvous is in a process that outlives the agents of torchrun. Otherwise the
agent of node 0 has it. That agent ends 300 s after its ranks (the exit barrier of
torch.distributed.elastic.agent.server), and then the agents of the other nodes lose the store and
kill ranks that still work. With `is_host=false` the agents only connect, and retry for 60 s (since
torch 1.9, torch.distributed.elastic.rendezvous.c10d_rendezvous_backend). The static rendezvous
needs no store while ranks run.
"""

from __future__ import annotations

import shlex
import subprocess
from typing import Mapping

from . import contract, processes
from .command import SHELL
from .output import say
from .settings import read

# Rounds use the port of the gang and the next ones in turns. A process of the round before may hold
# a port for some time.
PORTS = 16
# A store for each port that the launcher writes to its stdin, in place of the one before. It ends
# with the launcher, which has the other end.
_SERVE = """\
import sys
from torch.distributed import TCPStore
store = None
for port in sys.stdin:
    del store
    store = TCPStore("localhost", int(port), None, True, wait_for_workers=False)
"""
_BACKEND = "c10d"


def of_round(environment: Mapping[str, str], number: int) -> dict[str, str]:
    """The environment with the number, the rendezvous id and the port of this round.

    The first round has those of the pod.
    """
    changed = {**environment, contract.ROUND: str(number)}
    if number == 0:
        return changed
    if contract.PET_RDZV_ID in environment:
        changed[contract.PET_RDZV_ID] += f"-r{number}"
    port = read(environment, contract.PET_MASTER_PORT)
    if not port.isdigit():
        return changed
    port_of_round = str(int(port) + number % PORTS)
    master = read(environment, contract.PET_MASTER_ADDR)
    if read(environment, contract.PET_RDZV_ENDPOINT) == f"{master}:{port}":
        changed[contract.PET_RDZV_ENDPOINT] = f"{master}:{port_of_round}"
    changed[contract.PET_MASTER_PORT] = changed[contract.MASTER_PORT] = port_of_round
    return changed


class RoundStore:
    """The store of the present round on node 0; on other nodes only the option to connect to it.

    is_used: whether agents of this gang use it. python: the start of a command line of the Python
    that has torch; empty if it is not known. before: what selects its environment in a shell line.
    """

    def __init__(self, python: list[str], before: str, *, is_used: bool, is_host: bool) -> None:
        self._is_used = is_used
        self._python = python
        self._before = before
        self._is_host = is_host
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Replace the store of the round before. Returns the environment of the agents."""
        changed = dict(environment)
        if not self._is_used:
            return changed
        host, _, port = read(environment, contract.PET_RDZV_ENDPOINT).rpartition(":")
        is_here = host == read(environment, contract.PET_MASTER_ADDR) and port.isdigit()
        if read(environment, contract.PET_RDZV_BACKEND) != _BACKEND or not is_here:
            return changed
        if self._is_host and not self._serve(port, environment):
            return changed
        settings = [read(environment, contract.PET_RDZV_CONF), "is_host=false"]
        changed[contract.PET_RDZV_CONF] = ",".join(filter(None, settings))
        return changed

    def close(self) -> None:
        """End the store: no agent of its round runs any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            processes.forget(self._process.pid)
            self._process = None

    def _serve(self, port: str, environment: Mapping[str, str]) -> bool:
        """Serve the port, in the process of the round before: it has imported torch already."""
        if self._process is not None and self._send(port):
            return True
        self.close()
        return bool(self._python) and self._start(environment) and self._send(port)

    def _send(self, port: str) -> bool:
        """Whether the process of the store runs and has got the port."""
        process = self._process
        if process is None or process.stdin is None or process.poll() is not None:
            return False
        try:
            process.stdin.write(f"{port}\n".encode())
            process.stdin.flush()
        except OSError:
            return False
        return True

    def _start(self, environment: Mapping[str, str]) -> bool:
        argv = [*self._python, "-c", _SERVE]
        if self._before:
            argv = [SHELL, "-c", f"{self._before}{shlex.join(argv)}"]
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=dict(environment)
            )
        except OSError as error:
            say(f"torchrun of this node serves the rendezvous: {error}")
            return False
        processes.hide(self._process.pid)
        return True
