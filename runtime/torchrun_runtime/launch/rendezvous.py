"""The rendezvous of each round: agents of two rounds never meet."""

from __future__ import annotations

from typing import Mapping

from . import contract
from .settings import read

# Rounds use the port of the gang and the next ones in turns. A process of the round before may hold
# a port for some time.
PORTS = 16


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
