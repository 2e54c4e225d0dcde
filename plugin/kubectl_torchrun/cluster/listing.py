"""What the tables of jobs and of queues share."""

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
    """The request's result; a refusal to list all namespaces names the flag that asks for it."""
    try:
        return await request
    except ApiError as error:
        if error.status == 403 and everywhere:
            raise ClusterProblem(
                f"{error.message}\nLeave out --all-namespaces to see one namespace."
            ) from error
        raise


def note_unreadable(lines: Sequence[str], terminal: Terminal) -> None:
    """Print which objects are missing from the table."""
    for line in lines:
        terminal.note(f"Left out: {line}")


def v1_list(
    response: JsonObject, kind: str, wanted: Callable[[JsonObject], bool] = lambda _: True
) -> JsonObject:
    """The wanted items of a response as a v1 List, as kubectl prints it: each with its kind."""
    items = response.get("items")
    if not isinstance(items, list):
        raise ClusterProblem("The API server's answer is no list.")
    whole = ({"apiVersion": JOBS.api_version, "kind": kind, **item} for item in items
             if isinstance(item, dict) and wanted(item))  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [output.without_noise(item) for item in whole],
    }
