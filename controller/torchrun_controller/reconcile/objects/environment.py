"""The job's own Python environment, as its pods are told of it; the launcher makes and uses it.

It is kept on the workspace claim where there is one that can be written, and made there once by a
setup pod. Elsewhere every worker makes one for itself before its command.
"""

import hashlib

import msgspec

from torchrun_api import contract
from torchrun_api.json import JsonObject
from torchrun_api.variable import env_vars
from torchrun_controller.reconcile.objects.volumes import (
    LAUNCHER_DIR,
    WORKSPACE_SOURCE_DIR,
    keeps_state,
)
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, Setup

# Its path in use, the same in every pod: a virtual environment knows its own path.
LINK = f"{LAUNCHER_DIR}/env"
# In the workspace claim, made by the sync pod.
SUBPATH = "env"
STORE_DIR = "/torchrun-env"
_KEY_LENGTH = 16


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """One environment: `key` names its content, `shared` says that the workers find it made."""

    key: str
    setup: Setup
    shared: bool


def environment_of(run: ResolvedSpec, content: str) -> Environment | None:
    """The environment of a run whose workspace has this content; None where it has no setup."""
    setup = run.setup
    if setup is None:
        return None
    parts = msgspec.json.encode((content, run.image, setup.requirements, setup.command))
    key = hashlib.sha256(parts).hexdigest()[:_KEY_LENGTH]
    return Environment(key=key, setup=setup, shared=keeps_state(run))


def variables(environment: Environment, *, made_here: bool) -> list[JsonObject]:
    """v1 EnvVars for the launcher; `made_here` where this pod makes the environment."""
    store = STORE_DIR if made_here else f"{WORKSPACE_SOURCE_DIR}/{SUBPATH}"
    return env_vars(
        contract.ENV_STORE.env_var(store),
        contract.ENV_KEY.env_var(environment.key),
        contract.ENV_DIR.env_var(LINK),
        contract.SETUP.env_var(environment.setup if made_here else None),
    )


def mount(environment: Environment) -> JsonObject:
    """v1 VolumeMount of a pod that makes it."""
    if environment.shared:
        return {"name": "workspace-source", "mountPath": STORE_DIR, "subPath": SUBPATH}
    return {"name": "env", "mountPath": STORE_DIR}


def volumes(environment: Environment | None) -> list[JsonObject]:
    """v1 Volumes of a worker that makes it."""
    if environment is None or environment.shared:
        return []
    return [{"name": "env", "emptyDir": {}}]


def worker_variables(environment: Environment | None) -> list[JsonObject]:
    """v1 EnvVars of a worker."""
    if environment is None:
        return []
    return variables(environment, made_here=not environment.shared)


def worker_mounts(environment: Environment | None) -> list[JsonObject]:
    """v1 VolumeMounts of a worker that makes it."""
    return [] if environment is None or environment.shared else [mount(environment)]
