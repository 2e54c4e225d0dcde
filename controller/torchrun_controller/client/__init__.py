"""The connection to the API server: configuration, credentials, TLS, sessions, bytes in and out.

    connection = await Connection.load()
    async with connection.session("watch") as transport:
        response = await transport.request("GET", PODS.path("default"))
        async with transport.stream(PODS.path(), query={"watch": "true"}, total=330) as chunks:
            async for chunk in chunks:
                ...

Everything that goes wrong is one of two: `ApiError`, the server answered and refused, or
`Disconnected`, no whole answer came and a write may or may not have happened (of a watch that
is open `Silent`, where nothing has come over it for too long; of an answer that does not decode
`Garbled`, raised by `Response.read`). A configuration that cannot be used is a `ConfigError`,
raised by `Connection.load` alone.
"""

from torchrun_controller.client.connection import Connection
from torchrun_controller.client.errors import (
    ApiError,
    Cause,
    ConfigError,
    Disconnected,
    Garbled,
    Silent,
)
from torchrun_controller.client.session import Observe, Response, Transport

__all__ = [
    "ApiError",
    "Cause",
    "ConfigError",
    "Connection",
    "Disconnected",
    "Garbled",
    "Observe",
    "Response",
    "Silent",
    "Transport",
]
