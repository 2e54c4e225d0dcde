"""What the pod's environment says."""

from __future__ import annotations

import json
import os
from typing import Mapping, NamedTuple

from .delivery import Server
from .errors import LaunchError
from .install import Recipe
from .venv import Place


class Settings(NamedTuple):
    """command: a shell line or an argument vector. Times in seconds; grace None: the kubelet's.

    place: of the job's own environment, if it has one; recipe: given where it is made here.
    node: its index. state_dir: "" where there is none. hang_timeout: 0 for no watch.
    edit_wait: how long a failed command's pod waits for an edit in development mode.
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
    hosts: tuple[str, ...]
    termination_log: str
    start_file: str
    attempt: str
    state_dir: str
    job_uid: str
    place: Place | None
    recipe: Recipe | None
    server: Server | None
    node: str
    hang_timeout: float
    progress_url: str
    progress_token_file: str
    edit_wait: float


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Raises LaunchError (InvalidSetting) naming the variable, its value and what it takes."""
    launcher = environment.get("TORCHRUN_LAUNCHER", "auto")
    if launcher not in ("auto", "torchrun", "none"):
        raise _invalid("TORCHRUN_LAUNCHER", launcher, "auto, torchrun or none")
    grace = environment.get("TORCHRUN_GRACE_SECONDS", "")
    return Settings(
        command=_command(environment.get("TORCHRUN_COMMAND", "")),
        launcher=launcher,
        working_dir=environment.get("TORCHRUN_WORKING_DIR", ""),
        workspace_source=environment.get("TORCHRUN_WORKSPACE_SOURCE", ""),
        workspace_target=environment.get("TORCHRUN_WORKSPACE_TARGET", "/app"),
        sync_wait=_seconds(environment, "TORCHRUN_SYNC_WAIT_SECONDS", 600),
        resolve_wait=_seconds(environment, "TORCHRUN_RESOLVE_WAIT_SECONDS", 300),
        grace=_seconds(environment, "TORCHRUN_GRACE_SECONDS", 0) if grace else None,
        nnodes=environment.get("PET_NNODES", ""),
        hosts=_hosts(environment),
        termination_log=termination_log(environment),
        start_file=environment.get("TORCHRUN_START_FILE", ""),
        attempt=environment.get("TORCHRUN_ATTEMPT", ""),
        state_dir=environment.get("TORCHRUN_STATE_DIR", ""),
        job_uid=environment.get("TORCHRUN_JOB_UID", ""),
        place=_place(environment),
        recipe=_recipe(environment.get("TORCHRUN_SETUP", "")),
        server=_server(environment),
        node=environment.get("NODE_RANK", ""),
        hang_timeout=_seconds(environment, "TORCHRUN_HANG_TIMEOUT_SECONDS", 0),
        progress_url=environment.get("TORCHRUN_PROGRESS_URL", ""),
        progress_token_file=environment.get("TORCHRUN_PROGRESS_TOKEN_FILE", ""),
        edit_wait=_seconds(environment, "TORCHRUN_EDIT_WAIT_SECONDS", 3600),
    )


def beside_head(environment: Mapping[str, str]) -> dict[str, str]:
    """The node ranks of a worker whose head, node 0, has a Job of its own: one above its index."""
    if environment.get("TORCHRUN_ROLE") != "worker":
        return {}
    index = environment.get("NODE_RANK", "")
    if not index.isdecimal():
        raise _invalid("NODE_RANK", index, "the pod's completion index")
    rank = str(int(index) + 1)
    return {"NODE_RANK": rank, "PET_NODE_RANK": rank}


def termination_log(environment: Mapping[str, str]) -> str:
    """File of the termination message."""
    return environment.get("TORCHRUN_TERMINATION_LOG", "/dev/termination-log")


def _command(text: str) -> str | list[str]:
    accepted = "a JSON string (a shell line) or a JSON list of strings (an argument vector)"
    try:
        command = json.loads(text)
    except ValueError:
        raise _invalid("TORCHRUN_COMMAND", text, accepted) from None
    if isinstance(command, str) and command.strip():
        return command
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        return command
    raise _invalid("TORCHRUN_COMMAND", text, accepted)


def _place(environment: Mapping[str, str]) -> Place | None:
    folder, key, link = (
        environment.get(f"TORCHRUN_ENV_{name}", "") for name in ("STORE", "KEY", "DIR")
    )
    return Place(folder, key, link) if folder and key and link else None


def _server(environment: Mapping[str, str]) -> Server | None:
    url = environment.get("TORCHRUN_WORKSPACE_URL", "")
    if not url:
        return None
    token = os.path.join(environment.get("TORCHRUN_WORKSPACE_SOURCE", ""), "token")
    return Server(url, token, environment.get("TORCHRUN_WORKSPACE_MANIFEST", ""))


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
        raise _invalid("TORCHRUN_SETUP", text, accepted) from None


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise _invalid(name, text, "seconds, a number of at least 0")
    return value


def _hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names that torchrun and the ranks will look up: of the rendezvous and of the master."""
    endpoint = environment.get("PET_RDZV_ENDPOINT", "")
    host = endpoint.rsplit(":", 1)[0] if endpoint.count(":") == 1 else endpoint
    if endpoint.startswith("["):
        host = endpoint[1:].partition("]")[0]
    names = (host, environment.get("PET_MASTER_ADDR", ""), environment.get("MASTER_ADDR", ""))
    return tuple(dict.fromkeys(name for name in names if name))


def _invalid(name: str, value: str, accepted: str) -> LaunchError:
    return LaunchError("InvalidSetting", f"{name} is {value!r}; accepted: {accepted}")
