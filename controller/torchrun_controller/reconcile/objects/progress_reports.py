"""Progress reports of workers to the controller: variables, token and mount."""

from torchrun_api import contract
from torchrun_api.json import JsonObject
from torchrun_api.variable import env_vars
from torchrun_controller.reconcile.model.observed import Defaults

# Audience of the workers' tokens. A stolen token is of no use for the API server.
AUDIENCE = "torchrun.ai/progress"
TOKEN_DIR = "/torchrun-token"  # noqa: S105  # a path
_TOKEN_SECONDS = 3600  # the kubelet renews it before it expires


def variables(defaults: Defaults) -> list[JsonObject]:
    """Return the v1 EnvVars of a worker, none where the controller takes no reports."""
    if not defaults.progress_url:
        return []
    return env_vars(
        contract.PROGRESS_URL.env_var(defaults.progress_url),
        contract.PROGRESS_TOKEN_FILE.env_var(f"{TOKEN_DIR}/token"),
    )


def volumes(defaults: Defaults) -> list[JsonObject]:
    """Return the v1 Volume of the token that identifies the pod."""
    if not defaults.progress_url:
        return []
    token: JsonObject = {
        "audience": AUDIENCE,
        "expirationSeconds": _TOKEN_SECONDS,
        "path": "token",
    }
    sources: list[JsonObject] = [{"serviceAccountToken": token}]
    return [{"name": "progress-token", "projected": {"sources": [*sources]}}]


def mounts(defaults: Defaults) -> list[JsonObject]:
    """Return the v1 VolumeMount of the token."""
    if not defaults.progress_url:
        return []
    return [{"name": "progress-token", "mountPath": TOKEN_DIR, "readOnly": True}]
