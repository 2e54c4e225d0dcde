"""The tables of jobs and queues: lists for programs, and tables that follow changes."""

import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import RequestError
from kubectl_torchrun.cluster.job_watch import Changes
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.terminal import Display, has_colour
from kubectl_torchrun.text import join
from torchrun_api.json import JsonObject

R = TypeVar("R")


async def explain_all_namespaces(request: Awaitable[R], *, everywhere: bool) -> R:
    """The result of the request; a forbidden list of all namespaces names the flag to remove."""
    try:
        return await request
    except RequestError as error:
        if error.status == 403 and everywhere:
            raise ClusterProblem(
                f"{error.message}\nRemove --all-namespaces to list one namespace."
            ) from error
        raise


def note_unreadable(lines: Sequence[str], terminal: Display) -> None:
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


_AGE_SECONDS = 1.0  # the ages in a table change without an event
_PAUSE_SECONDS = 0.2  # between two pictures
_IDLE_SECONDS = 3600.0

Frame = Callable[[bool], Sequence[str]]


async def show_live(
    updates: Sequence[AsyncIterator[object]], frame: Frame, terminal: Display
) -> None:
    """Show the frame after each update, until cancelled.

    frame: the lines at this moment; its argument is whether to draw them on a terminal, with ages.
    """
    changes = Changes()
    missing = set(range(len(updates)))

    async def follow(number: int, update: AsyncIterator[object]) -> None:
        async for _ in update:
            missing.discard(number)
            changes.wake()

    async with anyio.create_task_group() as tasks:
        for number, update in enumerate(updates):
            tasks.start_soon(follow, number, update)
        while missing:  # the first picture is complete
            await changes.next_change(_IDLE_SECONDS)
        if sys.stdout.isatty() and terminal.live:
            await _redraw(changes, frame)
        else:
            await _print_new(changes, frame)


async def _redraw(changes: Changes, frame: Frame) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False, no_color=not has_colour(sys.stdout))
    with Live(console=console, auto_refresh=False) as drawing:
        while True:
            lines = _fit(frame(True), shutil.get_terminal_size().lines - 1)
            drawing.update(Text.from_ansi(join(lines), no_wrap=True, overflow="ellipsis"))
            drawing.refresh()
            await anyio.sleep(_PAUSE_SECONDS)
            await changes.next_change(_AGE_SECONDS - _PAUSE_SECONDS)


def _fit(lines: Sequence[str], height: int) -> list[str]:
    """The head and the last lines, if there are too many."""
    if len(lines) <= height or height < 3:
        return [*lines]
    hidden = len(lines) - height + 1
    return [lines[0], f"... {hidden} more", *lines[hidden + 1 :]]


async def _print_new(changes: Changes, frame: Frame) -> None:
    known: set[str] = set()
    while True:
        lines = frame(False)
        now = {" ".join(line.split()): line for line in lines}  # widths of columns change
        fresh = [line for text, line in now.items() if text not in known]
        if fresh:
            output.print_lines(fresh)
            sys.stdout.flush()
        known = set(now)
        await changes.next_change(_IDLE_SECONDS)
