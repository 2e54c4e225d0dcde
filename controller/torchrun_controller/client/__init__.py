"""The client of the API server: connection, requests, server-side apply, events, discovery.

    connection = await Connection.load()
    async with connection.session("watch") as transport:
        response = await transport.request("GET", PODS.path("default"))
        async with transport.stream(PODS.path(), query={"watch": "true"}, total=330) as chunks:
            async for chunk in chunks:
                ...

Two errors cover all failures. `ApiError`: the server answered and refused. `Disconnected`: no
complete answer came, and a write may or may not have happened. Disconnected has two subclasses:
`Silent`, an open watch delivered nothing for too long, and `InvalidResponse`, raised by
`Response.read` for an answer that does not decode. Only `Connection.load` and `Discovery` raise
`ConfigError`, for a configuration that cannot be used.
"""

from torchrun_controller.client.connection import Connection
from torchrun_controller.client.errors import (
    ApiError,
    ConfigError,
    Disconnected,
    InvalidResponse,
    Silent,
    StatusCause,
)
from torchrun_controller.client.session import Observe, Requests, Response, Transport

__all__ = [
    "ApiError",
    "ConfigError",
    "Connection",
    "Disconnected",
    "InvalidResponse",
    "Observe",
    "Requests",
    "Response",
    "Silent",
    "StatusCause",
    "Transport",
]
