"""The settings of a serve pod, from its environment, validated at the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrun_api.contract import sync
from torchrun_api.contract.variable import Variable
from torchrun_runtime.sync.errors import SyncError


@dataclass(frozen=True)
class ServeSettings:
    """namespace, job: of the workers. api_server: URL; api_dir: directory of token and ca.crt."""

    namespace: str
    job: str
    api_server: str
    directory: Path = Path(sync.SERVE_DIR.default)
    host: str = ""
    port: int = int(sync.SERVE_PORT.default)
    api_dir: Path = Path(sync.SERVE_API_DIR.default)


def from_environment(environment: Mapping[str, str]) -> ServeSettings:
    """Raises SyncError (InvalidSetting) with the variable and the accepted values."""
    port = sync.SERVE_PORT.read(environment)
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise _invalid(sync.SERVE_PORT.name, port, "a port")
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise _invalid("KUBERNETES_SERVICE_HOST", host, "the address of the API server")
    address = f"[{host}]" if ":" in host else host
    api_port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    return ServeSettings(
        namespace=_required(environment, sync.SERVE_NAMESPACE, "a namespace"),
        job=_required(environment, sync.SERVE_JOB, "the name of a job"),
        api_server=f"https://{address}:{api_port}",
        directory=Path(sync.SERVE_DIR.read(environment)),
        host=sync.SERVE_HOST.read(environment),
        port=int(port),
        api_dir=Path(sync.SERVE_API_DIR.read(environment)),
    )


def _required(environment: Mapping[str, str], variable: Variable[str], accepted: str) -> str:
    value = variable.read(environment)
    if not value:
        raise _invalid(variable.name, value, accepted)
    return value


def _invalid(name: str, value: str, accepted: str) -> SyncError:
    message = f"{name} is {value!r}. It must be {accepted}."
    return SyncError("InvalidSetting", message, permanent=True)
