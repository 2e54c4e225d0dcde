"""Helpers of the tables of jobs and queues."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import ApiError
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.terminal import Terminal
from torchrun_api.json import JsonObject

R = TypeVar("R")


async def explain_all_namespaces(request: Awaitable[R], *, everywhere: bool) -> R:
    """The result of the request; a forbidden list of all namespaces names the flag to remove."""
    try:
        return await request
    except ApiError as error:
        if error.status == 403 and everywhere:
            raise ClusterProblem(
                f"{error.message}\nRemove --all-namespaces to list one namespace."
            ) from error
        raise


def note_unreadable(lines: Sequence[str], terminal: Terminal) -> None:
    """Print which objects are missing from the table."""
    for line in lines:
        terminal.note(f"Skipped: {line}")


def v1_list(
    response: JsonObject, kind: str, predicate: Callable[[JsonObject], bool] = lambda _: True
) -> JsonObject:
    """The selected items of a response as a v1 List with kinds, as kubectl prints it."""
    items = response.get("items")
    if not isinstance(items, list):
        raise ClusterProblem("The API server did not return a list.")
    selected = ({"apiVersion": JOBS.api_version, "kind": kind, **item} for item in items
                if isinstance(item, dict) and predicate(item))  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [output.without_noise(item) for item in selected],
    }
