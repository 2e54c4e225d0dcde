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


class Endpoint(Struct, frozen=True):
    """A server and how to reach it."""

    server: str
    tls: ssl.SSLContext | None = None
    server_hostname: str | None = None
    proxy: str | None = None
    namespace: str = "default"


class Credentials(Protocol):
    """Source of the Authorization header, "" for a client certificate or no credentials."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for new connections since the last `read` or `renew`; None: unchanged."""

    async def read(self) -> str:
        """Return the present value; called about once a minute. Raises ConfigError."""

    async def renew(self) -> str:
        """Return a fresh value, without any cache, after the server refused the last one."""


class Trust:
    """A TLS context that follows the files of the cluster's CA and of our client certificate."""

    def __init__(self, ca_file: str | None, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is a context that was built from `ca_file` before. Raises ConfigError."""
        self.tls = tls or tls_context(ca_file)
        self._ca = _read_file(ca_file)
        self._certificate = b""

    def refresh(
        self, ca_file: str | None, cert_file: str | None = None, key_file: str | None = None
    ) -> None:
        """Replace the context if a file has changed; keep it if a new file cannot be used.

        A context can only be extended, so it is replaced: open connections keep a removed CA and an
        expired certificate until they end, new ones do not use them. Raises OSError if the
        certificate or its key cannot be loaded.
        """
        ca, certificate = _read_file(ca_file) or self._ca, _read_file(cert_file)
        if (ca, certificate) == (self._ca, self._certificate):
            return
        try:
            tls = tls_context(ca_file)
        except ConfigError as error:
            log.warning(
                "cannot load the new CA of the cluster; the previous one remains in use",
                error=str(error),
            )
            return
        if cert_file:
            tls.load_cert_chain(cert_file, key_file)
        if ca != self._ca:
            log.info("the new CA of the cluster is in use", file=ca_file)
        self.tls, self._ca, self._certificate = tls, ca, certificate


def _read_file(file: str | None) -> bytes:
    try:
        return Path(file).read_bytes() if file else b""
    except OSError:
        return b""


class ServiceAccount:
    """The token and CA mounted into a pod, which the kubelet replaces before they expire."""

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None) -> None:
        self._token = folder / "token"
        self._ca = str(folder / "ca.crt")
        self._trust = Trust(self._ca, tls)

    @property
    def tls(self) -> ssl.SSLContext:
        """The context for the mounted CA."""
        return self._trust.tls

    async def read(self) -> str:
        """Read the token. Raises ConfigError if it is missing."""
        try:
            token = self._token.read_text().strip()
        except OSError as error:
            raise ConfigError(f"cannot read the service account's token: {error}") from error
        self._trust.refresh(self._ca)
        return f"Bearer {token}"

    async def renew(self) -> str:
        """Read it again."""
        return await self.read()


class Kubeconfig:
    """A kubeconfig with exec plugins, token files and certificates, read by kubernetes_asyncio."""

    def __init__(self, path: str, context: str | None, timeout: float = 60.0) -> None:
        self._path = path
        self._timeout = timeout
        self._context = context
        self._trust: Trust | None = None  # with https
        self._loader: KubeConfigLoader
        self._configuration: Configuration

    async def endpoint(self) -> Endpoint:
        """Read the file; raises ConfigError."""
        await self._load()
        configuration = self._configuration
        host: str = configuration.host or ""
        if host.startswith("https"):
            if not configuration.verify_ssl:
                raise ConfigError(
                    f"kubeconfig {self._path}: insecure-skip-tls-verify is not supported; "
                    "put the cluster's CA in certificate-authority instead"
                )
            self._trust = Trust(configuration.ssl_ca_cert)
            self._load_client_certificate()
        current = (self._loader.current_context or {}).get("context") or {}
        return Endpoint(
            server=host,
            tls=self.tls,
            server_hostname=configuration.tls_server_name,
            proxy=configuration.proxy or _environment_proxy(host),
            namespace=current.get("namespace") or "default",
        )

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The context for the CA of the kubeconfig, with its client certificate."""
        return self._trust.tls if self._trust is not None else None

    async def read(self) -> str:
        """Let the loader renew what has expired; raises ConfigError."""
        await self._await_loader(self._loader.load_and_set(self._configuration))
        self._load_client_certificate()
        return self._authorization()

    async def renew(self) -> str:
        """Read everything again: the loader caches a plugin's token until it expires."""
        await self._load()
        self._load_client_certificate()
        return self._authorization()

    async def _load(self) -> None:
        if not any(map(os.path.exists, self._path.split(os.pathsep))):
            raise ConfigError(
                f"kubeconfig {self._path} cannot be used: it does not exist; "
                "set --kubeconfig or KUBECONFIG"
            )
        reader = slim.import_reader()
        configuration = reader.configuration()
        self._loader = await self._await_loader(
            reader.load_kube_config(self._path, self._context, client_configuration=configuration)
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
                f"kubeconfig {self._path}: its credential plugin did not respond "
                f"within {self._timeout:g} s"
            ) from error
        except Exception as error:  # the loader raises any type, also AssertionError
            raise self._config_error(error) from error

    def _authorization(self) -> str:
        value: str = self._configuration.api_key.get("BearerToken", "")
        return value

    def _load_client_certificate(self) -> None:
        # A certificate may be replaced on disk or by a plugin.
        configuration = self._configuration
        if self._trust is None:
            return
        try:
            self._trust.refresh(
                configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file
            )
        except OSError as error:
            raise self._config_error(error) from error

    def _config_error(self, error: Exception) -> ConfigError:
        detail = f"{type(error).__name__}: {error}".removesuffix(": ")
        return ConfigError(f"kubeconfig {self._path} cannot be used: {detail}")


def kubeconfig_path(kubeconfig: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the kubeconfig of the argument or of $KUBECONFIG (a list of paths)."""
    path = kubeconfig or environ.get("KUBECONFIG")
    return os.path.expanduser(path) if path else None


def in_cluster(environ: Mapping[str, str], folder: Path) -> Endpoint | None:
    """Return the API server as seen from a pod, None outside a pod. Raises ConfigError."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (folder / "token").exists():
        return None
    namespace = folder / "namespace"
    return Endpoint(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        tls=tls_context(str(folder / "ca.crt")),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


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
    # aiohttp's trust_env would also read ~/.netrc, in a thread, for each request.
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
