"""What the pod's environment says, checked once at the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrun_runtime.sync.errors import SyncError


@dataclass(frozen=True)
class Settings:
    """namespace, job: whose workers are served. api_server: its URL; api_dir: token and ca.crt."""

    namespace: str
    job: str
    api_server: str
    directory: Path = Path("/workspace")
    host: str = ""
    port: int = 8081
    api_dir: Path = Path("/torchrun-api")


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Raises SyncError (InvalidSetting) naming the variable and what it takes."""
    port = environment.get("TORCHRUN_SERVE_PORT", "8081")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise _invalid("TORCHRUN_SERVE_PORT", port, "a port")
    host = _required(environment, "KUBERNETES_SERVICE_HOST", "the API server's address")
    address = f"[{host}]" if ":" in host else host
    api_port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    return Settings(
        namespace=_required(environment, "TORCHRUN_SERVE_NAMESPACE", "a namespace"),
        job=_required(environment, "TORCHRUN_SERVE_JOB", "the name of a job"),
        api_server=f"https://{address}:{api_port}",
        directory=Path(environment.get("TORCHRUN_SERVE_DIR", Settings.directory)),
        host=environment.get("TORCHRUN_SERVE_HOST", ""),
        port=int(port),
        api_dir=Path(environment.get("TORCHRUN_SERVE_API_DIR", Settings.api_dir)),
    )


def _required(environment: Mapping[str, str], name: str, accepted: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise _invalid(name, value, accepted)
    return value


def _invalid(name: str, value: str, accepted: str) -> SyncError:
    message = f"{name} is {value!r}; accepted: {accepted}"
    return SyncError("InvalidSetting", message, permanent=True)
