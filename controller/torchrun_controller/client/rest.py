"""The REST client of kubernetes_asyncio, for lists and watches."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from torchrun_controller.client import slim
from torchrun_controller.client.credentials import Endpoint

if TYPE_CHECKING:
    from kubernetes_asyncio.client.rest import RESTClientObject


class RestClients:
    """One client for the present endpoint. A new CA or client certificate makes another.

    A client that was replaced stays until the last watch that uses it has ended.
    """

    def __init__(self) -> None:
        self._current: _Client | None = None

    @asynccontextmanager
    async def client(self, endpoint: Endpoint) -> AsyncIterator["RESTClientObject"]:
        """Use the client of an endpoint. Raises OSError if a file of its TLS cannot be loaded."""
        if self._current is None or self._current.endpoint is not endpoint:
            former, self._current = self._current, _Client(endpoint)
            if former is not None and former.users == 0:
                await former.rest.close()
        used = self._current
        used.users += 1
        try:
            yield used.rest
        finally:
            used.users -= 1
            if used is not self._current and used.users == 0:
                await used.rest.close()

    async def close(self) -> None:
        """Close the client; those that were replaced are closed by their users."""
        if self._current is not None:
            await self._current.rest.close()


class _Client:
    """A client and the number of its responses that are open."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.users = 0
        library = slim.import_library()
        configuration = library.configuration()
        if endpoint.tls is not None:
            configuration.ssl_ca_cert = endpoint.tls.ca_file
            configuration.cert_file = endpoint.tls.cert_file
            configuration.key_file = endpoint.tls.key_file
        configuration.disable_strict_ssl_verification = True  # as `credentials.tls_context`
        configuration.tls_server_name = endpoint.server_hostname
        configuration.proxy = endpoint.proxy
        configuration.connection_pool_maxsize = 0  # no limit: six watches for each namespace
        self.rest = library.rest_client(configuration)
        # The endpoint has the proxy. aiohttp would read the environment without networks in
        # NO_PROXY, and ~/.netrc; the library has no option for it.
        self.rest.pool_manager._trust_env = False
