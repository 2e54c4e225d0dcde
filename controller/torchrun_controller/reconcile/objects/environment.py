"""The Python environment of a job (spec.setup): variables and mounts for the launcher.

On a writable workspace PVC, a setup pod creates the environment once. Otherwise every worker
creates its own before it runs its command.
"""

import hashlib

import msgspec

from torchrun_api import names
from torchrun_api.contract import launch
from torchrun_api.contract.variable import env_vars
from torchrun_api.json import JsonObject
from torchrun_controller.reconcile.objects.volumes import (
    WORKSPACE_SOURCE_DIR,
    keeps_state,
)
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, Setup

# Its path, the same in every pod: a virtual environment contains its own path.
LINK = f"{names.LAUNCHER_DIR}/env"
# In the workspace PVC; the sync pod creates it.
SUBPATH = "env"
STORE_DIR = "/torchrun-env"
_KEY_LENGTH = 16


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """One environment. `key` identifies its content; a `shared` one is created by a setup pod."""

    key: str
    setup: Setup
    shared: bool


def environment_of(run: ResolvedSpec, content: str) -> Environment | None:
    """Return the environment for a workspace with this content; None without spec.setup."""
    setup = run.setup
    if setup is None:
        return None
    inputs = (content, run.image, run.working_dir, setup.requirements, setup.command)
    parts = msgspec.json.encode(inputs)
    key = hashlib.sha256(parts).hexdigest()[:_KEY_LENGTH]
    return Environment(key=key, setup=setup, shared=keeps_state(run))


def variables(environment: Environment, *, creates: bool) -> list[JsonObject]:
    """Return v1 EnvVars for the launcher. With `creates` this pod creates the environment."""
    store = STORE_DIR if creates else f"{WORKSPACE_SOURCE_DIR}/{SUBPATH}"
    return env_vars(
        launch.ENV_STORE.env_var(store),
        launch.ENV_KEY.env_var(environment.key),
        launch.ENV_DIR.env_var(LINK),
        launch.SETUP.env_var(environment.setup if creates else None),
    )


def mount(environment: Environment) -> JsonObject:
    """Return the v1 VolumeMount of a pod that creates it."""
    if environment.shared:
        return {"name": "workspace-source", "mountPath": STORE_DIR, "subPath": SUBPATH}
    return {"name": "env", "mountPath": STORE_DIR}


def volumes(environment: Environment | None) -> list[JsonObject]:
    """Return the v1 Volumes of a worker that creates it."""
    if environment is None or environment.shared:
        return []
    return [{"name": "env", "emptyDir": {}}]


def worker_variables(environment: Environment | None) -> list[JsonObject]:
    """Return the v1 EnvVars of a worker."""
    if environment is None:
        return []
    return variables(environment, creates=not environment.shared)


def worker_mounts(environment: Environment | None) -> list[JsonObject]:
    """Return the v1 VolumeMounts of a worker that creates it."""
    return [] if environment is None or environment.shared else [mount(environment)]
