"""The launcher's settings, from the pod's environment."""

from __future__ import annotations

import json
import os
from typing import Mapping, NamedTuple

from . import contract
from .cause import LaunchError
from .gang.policy import RestartLimits, read_limits
from .gang.rounds import GangNode
from .reporting import ReportPort
from .served import Server
from .venv import EnvironmentPaths, Recipe

_ADDRESS = (contract.PET_MASTER_ADDR, contract.PET_MASTER_PORT)
# Options of torchrun whose defaults differ between its versions.
_OPTIONS = (contract.PET_RDZV_BACKEND, contract.PET_MAX_RESTARTS)
# What programs without torchrun read, and torchrun's own name of the node rank.
_COPIES = {
    contract.MASTER_ADDR: contract.PET_MASTER_ADDR,
    contract.MASTER_PORT: contract.PET_MASTER_PORT,
    contract.NNODES: contract.PET_NNODES,
    contract.PET_NODE_RANK: contract.NODE_RANK,
}


class LaunchSettings(NamedTuple):
    """command: a shell line or an argument vector. Times in seconds; grace None: the kubelet's.

    place: of the job's Python environment, if it has one; recipe: set if this pod creates it.
    ranks: of all nodes. node: index of the node. state_dir: "" for none. hang_timeout: 0 for no
    watch. edit_wait: how long a failed command's pod waits for an edit in development mode.
    """

    command: str | list[str]
    launcher: str
    working_dir: str
    workspace_source: str
    workspace_target: str
    sync_wait: float
    resolve_wait: float
    grace: float | None
    nnodes: str
    ranks: int
    hosts: tuple[str, ...]
    start_file: str
    attempt: str
    state_dir: str
    job_uid: str
    place: EnvironmentPaths | None
    recipe: Recipe | None
    server: Server | None
    node: str
    hang_timeout: float
    report_port: ReportPort | None
    edit_wait: float
    gang: GangNode
    limits: RestartLimits


def from_environment(environment: Mapping[str, str]) -> LaunchSettings:
    """Raises LaunchError (InvalidSetting) with the variable, its value and the accepted values."""
    launcher = read(environment, contract.LAUNCHER_MODE)
    if launcher not in ("auto", "torchrun", "none"):
        raise _invalid(contract.LAUNCHER_MODE, launcher, "auto, torchrun or none")
    grace = read(environment, contract.GRACE_SECONDS)
    return LaunchSettings(
        command=_command(read(environment, contract.COMMAND)),
        launcher=launcher,
        working_dir=read(environment, contract.WORKING_DIR),
        workspace_source=read(environment, contract.WORKSPACE_SOURCE),
        workspace_target=read(environment, contract.WORKSPACE_TARGET),
        sync_wait=_seconds(environment, contract.SYNC_WAIT_SECONDS),
        resolve_wait=_seconds(environment, contract.RESOLVE_WAIT_SECONDS),
        grace=_seconds(environment, contract.GRACE_SECONDS) if grace else None,
        nnodes=read(environment, contract.PET_NNODES),
        ranks=_ranks(environment),
        hosts=_hosts(environment),
        start_file=read(environment, contract.START_FILE),
        attempt=read(environment, contract.ATTEMPT),
        state_dir=read(environment, contract.STATE_DIR),
        job_uid=read(environment, contract.JOB_UID),
        place=_place(environment),
        recipe=_recipe(read(environment, contract.SETUP)),
        server=_server(environment),
        node=read(environment, contract.NODE_RANK),
        hang_timeout=_seconds(environment, contract.HANG_TIMEOUT_SECONDS),
        report_port=_report_port(environment),
        edit_wait=_seconds(environment, contract.EDIT_WAIT_SECONDS),
        gang=_gang(environment),
        limits=read_limits(read(environment, contract.IN_PLACE_RESTARTS)),
    )


def read(environment: Mapping[str, str], name: str) -> str:
    """The value of a variable of the contract, or its default."""
    return environment.get(name, contract.DEFAULTS.get(name, ""))


def complete(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a pod with the variables that follow from others.

    The node rank of a worker whose head, node 0, has a separate Job is its index plus one. Raises
    LaunchError (InvalidSetting) if the index is not a number.
    """
    derived: dict[str, str] = {}
    for name, source in _COPIES.items():
        if source in environment:
            derived[name] = environment[source]
    address, port = (read(environment, name) for name in _ADDRESS)
    if address and port:
        derived[contract.PET_RDZV_ENDPOINT] = f"{address}:{port}"
    uid, attempt = read(environment, contract.JOB_UID), read(environment, contract.ATTEMPT)
    if uid and attempt:
        derived[contract.PET_RDZV_ID] = f"{uid}-{attempt}"
    if contract.PET_NNODES in environment:
        derived.update({name: contract.DEFAULTS[name] for name in _OPTIONS})
    completed = {**derived, **environment}
    if read(environment, contract.ROLE) == "worker":
        index = read(environment, contract.NODE_RANK)
        if not index.isdecimal():
            raise _invalid(contract.NODE_RANK, index, "the pod's completion index")
        completed[contract.NODE_RANK] = completed[contract.PET_NODE_RANK] = str(int(index) + 1)
    return completed


def _gang(environment: Mapping[str, str]) -> GangNode:
    """This node of the gang. Without a port, each node starts by itself."""
    port = read(environment, contract.GANG_PORT) or "0"
    size = read(environment, contract.PET_NNODES) if port != "0" else "1"
    rank = read(environment, contract.NODE_RANK) if port != "0" else "0"
    names = (contract.GANG_PORT, contract.PET_NNODES, contract.NODE_RANK)
    for name, value in zip(names, (port, size, rank)):
        if not value.isdecimal():
            raise _invalid(name, value, "a number")
    secret = read(environment, contract.GANG_KEY) or read(environment, contract.JOB_UID)
    key = f"{secret} {read(environment, contract.ATTEMPT)}"
    host = read(environment, contract.PET_MASTER_ADDR)
    is_head = read(environment, contract.ROLE) == "head"
    return GangNode(int(rank), int(size), host, int(port), key, is_head)


def _ranks(environment: Mapping[str, str]) -> int:
    """The number of ranks of the gang, as far as it is known: 0 for `--nproc-per-node=auto`."""
    sizes = (contract.PET_NNODES, contract.PET_NPROC_PER_NODE)
    nodes, per_node = (read(environment, size) for size in sizes)
    return int(nodes) * int(per_node) if nodes.isdecimal() and per_node.isdecimal() else 0


def _command(text: str) -> str | list[str]:
    accepted = "a JSON string (a shell line) or a JSON list of strings (an argument vector)"
    try:
        command = json.loads(text)
    except ValueError:
        raise _invalid(contract.COMMAND, text, accepted) from None
    if isinstance(command, str) and command.strip():
        return command
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        return command
    raise _invalid(contract.COMMAND, text, accepted)


def _place(environment: Mapping[str, str]) -> EnvironmentPaths | None:
    folder = read(environment, contract.ENV_STORE)
    key = read(environment, contract.ENV_KEY)
    link = read(environment, contract.ENV_DIR)
    return EnvironmentPaths(folder, key, link) if folder and key and link else None


def _report_port(environment: Mapping[str, str]) -> ReportPort | None:
    url = read(environment, contract.PROGRESS_URL)
    return ReportPort(url, read(environment, contract.PROGRESS_TOKEN_FILE)) if url else None


def _server(environment: Mapping[str, str]) -> Server | None:
    url = read(environment, contract.WORKSPACE_URL)
    if not url:
        return None
    token = os.path.join(read(environment, contract.WORKSPACE_SOURCE), "token")
    return Server(url, token, read(environment, contract.WORKSPACE_MANIFEST))


def _recipe(text: str) -> Recipe | None:
    if not text:
        return None
    try:
        body = json.loads(text)
        command = body["command"]
        return Recipe(
            tuple(body["requirements"]), command if isinstance(command, str) else list(command)
        )
    except (ValueError, KeyError, TypeError):
        accepted = 'JSON as {"requirements": ["einops"], "command": "make"}'
        raise _invalid(contract.SETUP, text, accepted) from None


def _seconds(environment: Mapping[str, str], name: str) -> float:
    text = environment.get(name, "")
    try:
        value = float(text or contract.DEFAULTS[name])
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise _invalid(name, text, "seconds, a number of at least 0")
    return value


def _hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Host names that torchrun and the ranks resolve: of the rendezvous and of the master."""
    endpoint = read(environment, contract.PET_RDZV_ENDPOINT)
    host = endpoint.rsplit(":", 1)[0] if endpoint.count(":") == 1 else endpoint
    if endpoint.startswith("["):
        host = endpoint[1:].partition("]")[0]
    names = (
        host,
        read(environment, contract.PET_MASTER_ADDR),
        read(environment, contract.MASTER_ADDR),
    )
    return tuple(dict.fromkeys(name for name in names if name))


def _invalid(name: str, value: str, accepted: str) -> LaunchError:
    return LaunchError("InvalidSetting", f"{name} is {value!r}. It must be {accepted}.")
