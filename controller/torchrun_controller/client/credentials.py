"""Sources of the server's address, its CA and our credentials."""

import asyncio  # for the loader of kubeconfigs, which is written for asyncio
import ipaddress
import os
import ssl
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog
from msgspec import Struct

from torchrun_controller.client import slim
from torchrun_controller.client.errors import ConfigError

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

T = TypeVar("T")

# Mounted into every pod with a service account:
# https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Tls(Struct, frozen=True):
    """How the server is verified, and our client certificate: a context, and its files.

    kubernetes_asyncio reads the files itself.
    """

    context: ssl.SSLContext
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


class Endpoint(Struct, frozen=True):
    """A server and how to reach it."""

    server: str
    tls: Tls | None = None
    server_hostname: str | None = None
    proxy: str | None = None
    namespace: str = "default"


class Credentials(Protocol):
    """Source of the Authorization header, "" for a client certificate or no credentials."""

    @property
    def tls(self) -> Tls | None:
        """The TLS of new connections since the last `read` or `renew`; None: unchanged."""

    async def read(self) -> str:
        """Return the present value; called about once a minute. Raises ConfigError."""

    async def renew(self) -> str:
        """Return a fresh value, without any cache, after the server refused the last one."""


class Trust:
    """TLS that follows the files of the cluster's CA and of our client certificate."""

    def __init__(self, ca_file: str | None) -> None:
        """Raises ConfigError."""
        self.tls = load_tls(ca_file)
        self._ca = _read_file(ca_file)
        self._certificate = b""

    def refresh(
        self, ca_file: str | None, cert_file: str | None = None, key_file: str | None = None
    ) -> None:
        """Replace `tls` if a file has changed; keep it if a new file cannot be used.

        A context can only be extended, so it is replaced: open connections keep a removed CA and an
        expired certificate until they end, new ones do not use them. Raises OSError if the
        certificate or its key cannot be loaded.
        """
        ca, certificate = _read_file(ca_file) or self._ca, _read_file(cert_file)
        if (ca, certificate) == (self._ca, self._certificate):
            return
        try:
            tls = load_tls(ca_file, cert_file, key_file)
        except ConfigError as error:
            log.warning(
                "cannot load the new CA of the cluster; the previous one remains in use",
                error=str(error),
            )
            return
        if ca != self._ca:
            log.info("the new CA of the cluster is in use", file=ca_file)
        self.tls, self._ca, self._certificate = tls, ca, certificate


def _read_file(file: str | None) -> bytes:
    try:
        return Path(file).read_bytes() if file else b""
    except OSError:
        return b""


class _Loaded:
    """What a loader of kubernetes_asyncio puts into its Configuration. `source` names its input."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._trust: Trust | None = None  # with https
        self._configuration: Configuration

    @property
    def tls(self) -> Tls | None:
        """TLS with the CA of the cluster and our client certificate, as they are now."""
        return self._trust.tls if self._trust is not None else None

    def _take(self) -> str:
        """Use the files and the token that are loaded. Returns the Authorization header."""
        configuration = self._configuration
        if self._trust is not None:
            # A certificate may be replaced on disk or by a plugin.
            try:
                self._trust.refresh(
                    configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file
                )
            except OSError as error:
                raise self._config_error(error) from error
        value: str = configuration.api_key.get("BearerToken", "")
        return value.strip()  # a token file may end with a newline

    def _config_error(self, error: Exception) -> ConfigError:
        detail = f"{type(error).__name__}: {error}".removesuffix(": ")
        return ConfigError(f"{self._source} cannot be used: {detail}")


class ServiceAccount(_Loaded):
    """The token and CA mounted into a pod, which the kubelet replaces before they expire."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        super().__init__(f"service account {folder}")
        library = slim.import_library()
        self._folder = folder
        self._configuration = library.configuration()
        self._loader = library.in_cluster_loader(
            str(folder / "token"), str(folder / "ca.crt"), environ=dict(environ)
        )

    def endpoint(self) -> Endpoint:
        """Return the API server as seen from the pod. Raises ConfigError."""
        self._load()
        self._trust = Trust(self._configuration.ssl_ca_cert)
        namespace = self._folder / "namespace"
        return Endpoint(
            server=self._loader.host,
            tls=self.tls,
            namespace=namespace.read_text().strip() if namespace.exists() else "default",
        )

    async def read(self) -> str:
        """Read the token and the CA. Raises ConfigError."""
        self._load()
        return self._take()

    async def renew(self) -> str:
        """Read them again."""
        return await self.read()

    def _load(self) -> None:
        try:
            self._loader.load_and_set(self._configuration)
        except Exception as error:  # as of the loader of kubeconfigs
            raise self._config_error(error) from error


class Kubeconfig(_Loaded):
    """A kubeconfig with exec plugins, token files and certificates."""

    def __init__(self, path: str, context: str | None, timeout: float = 60.0) -> None:
        super().__init__(f"kubeconfig {path}")
        self._path = path
        self._timeout = timeout
        self._context = context
        self._loader: KubeConfigLoader

    async def endpoint(self) -> Endpoint:
        """Read the file; raises ConfigError."""
        await self._load()
        configuration = self._configuration
        host: str = configuration.host or ""
        if host.startswith("https"):
            if not configuration.verify_ssl:
                raise ConfigError(
                    f"{self._source}: insecure-skip-tls-verify is not supported; "
                    "put the cluster's CA in certificate-authority instead"
                )
            self._trust = Trust(configuration.ssl_ca_cert)
            self._take()
        current = (self._loader.current_context or {}).get("context") or {}
        return Endpoint(
            server=host,
            tls=self.tls,
            server_hostname=configuration.tls_server_name,
            proxy=configuration.proxy or _environment_proxy(host),
            namespace=current.get("namespace") or "default",
        )

    async def read(self) -> str:
        """Let the loader renew what has expired; raises ConfigError."""
        await self._await_loader(self._loader.load_and_set(self._configuration))
        return self._take()

    async def renew(self) -> str:
        """Read everything again: the loader caches a plugin's token until it expires."""
        await self._load()
        return self._take()

    async def _load(self) -> None:
        if not any(map(os.path.exists, self._path.split(os.pathsep))):
            raise ConfigError(
                f"{self._source} cannot be used: it does not exist; set --kubeconfig or KUBECONFIG"
            )
        library = slim.import_library()
        configuration = library.configuration()
        self._loader = await self._await_loader(
            library.load_kube_config(self._path, self._context, client_configuration=configuration)
        )
        self._configuration = configuration

    async def _await_loader(self, loading: Awaitable[T]) -> T:
        try:
            # Not anyio.fail_after: it cancels repeatedly, and would cancel asyncio's own wait for
            # the plugin that it kills.
            async with asyncio.timeout(self._timeout):
                return await loading
        except TimeoutError as error:
            raise ConfigError(
                f"{self._source}: its credential plugin did not respond within {self._timeout:g} s"
            ) from error
        except Exception as error:  # the loader raises any type, also AssertionError
            raise self._config_error(error) from error


def kubeconfig_path(kubeconfig: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the kubeconfig of the argument or of $KUBECONFIG (a list of paths)."""
    path = kubeconfig or environ.get("KUBECONFIG")
    return os.path.expanduser(path) if path else None


def is_in_pod(environ: Mapping[str, str], folder: Path) -> bool:
    """Whether the process runs in a pod with a service account."""
    address = (environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    return all(address) and (folder / "token").exists()


def home_kubeconfig(environ: Mapping[str, str]) -> str:
    """Return ~/.kube/config. Raises ConfigError if it does not exist."""
    path = os.path.join(environ.get("HOME", ""), ".kube", "config")
    if not os.path.exists(path):
        raise ConfigError(
            "no cluster is configured: set --kubeconfig or KUBECONFIG, "
            f"or run in a pod with a service account ({path} does not exist either)"
        )
    return path


def _environment_proxy(server: str) -> str | None:
    # aiohttp's trust_env does not know networks, and also reads ~/.netrc for each request.
    url, proxies = urllib.parse.urlsplit(server), urllib.request.getproxies()
    host = url.hostname or ""
    if urllib.request.proxy_bypass(f"{host}:{url.port}" if url.port else host):
        return None
    if _in_networks(host, proxies.get("no", "").split(",")):
        return None
    return proxies.get(url.scheme)


def _in_networks(host: str, entries: Iterable[str]) -> bool:
    """Whether the host is an address in one of these networks, as Go reads NO_PROXY.

    Python matches names and single addresses only; networks such as 10.0.0.0/8 are common.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for entry in entries:
        with suppress(ValueError):  # a name
            if address in ipaddress.ip_network(entry.strip(" []"), strict=False):
                return True
    return False


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Verify the server fully, but accept a CA without the extensions that RFC 5280 requires.

    Python 3.13 and newer refuse such a CA by default, and many clusters have one. Raises
    ConfigError if `ca_file` cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"cannot read the cluster's CA from {ca_file}: {error}") from error
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def load_tls(ca_file: str | None, cert_file: str | None = None, key_file: str | None = None) -> Tls:
    """Load a CA, and a client certificate if there is one.

    Raises ConfigError for the CA, and OSError for the certificate.
    """
    context = tls_context(ca_file)
    if cert_file:
        context.load_cert_chain(cert_file, key_file)
    return Tls(context, ca_file, cert_file, key_file)
