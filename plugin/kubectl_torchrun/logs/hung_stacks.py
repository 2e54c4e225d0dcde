"""The stacks of a hung gang, which each launcher has written to its log."""

import re
from collections.abc import Iterable, Sequence

import anyio
from msgspec.structs import replace

from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.pods import attempt_of, has_started, rank_of
from kubectl_torchrun.logs.stacks import ProcessStack, lines_of
from torchrun_api import names
from torchrun_api.kinds.core import Pod

_READ = 4000  # lines at the end of the log of one node
_AT_ONCE = 16
_PRINTED = 80
# As runtime/torchrun_runtime/launch/stacks.py writes them.
_HEAD = re.compile(rb"torchrun-launch: stack of (.*)\[(\d+)\](?: of rank (\d+))?:")
_NONE = re.compile(
    rb"torchrun-launch: no stack of (.*)\[(\d+)\](?: of rank (\d+))?, its state is (.*?):"
)
_OF_STACK = re.compile(rb"(Current thread|Thread) 0x|  |$")  # a line of faulthandler


async def read(api: Api, workers: Sequence[Pod], attempt: int) -> list[bytes]:
    """The folded stacks of an attempt, the odd rank first; empty if its pods or logs are gone."""
    stacks: dict[int, list[ProcessStack]] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def add(pod: Pod) -> None:
        async with limiter:
            try:
                query = {"tailLines": str(_READ)}
                async with api.log(pod.metadata.name, names.TRAINER_CONTAINER, query) as lines:
                    read = [line async for line in lines]
            except RequestError:
                return
        stacks[rank_of(pod)] = stacks_in(read, str(rank_of(pod)))

    async with anyio.create_task_group() as tasks:
        for pod in workers:
            if attempt_of(pod) == attempt and has_started(pod, names.TRAINER_CONTAINER):
                tasks.start_soon(add, pod)
    lines = lines_of([stack for _, found in sorted(stacks.items()) for stack in found])
    more = [f"and {len(lines) - _PRINTED} lines more"] if len(lines) > _PRINTED else []
    return [line.encode() for line in [*lines[:_PRINTED], *more]]


def stacks_in(lines: Iterable[bytes], node: str) -> list[ProcessStack]:
    """The newest stack of each process in the log of a node.

    The launcher writes the ranks before their children, which have the same number.
    """
    found: dict[int, ProcessStack] = {}
    texts: dict[int, list[bytes]] = {}
    ranks: dict[int | None, int] = {}
    present: list[bytes] | None = None
    for line in lines:
        match = _HEAD.match(line) or _NONE.match(line)
        if match is None:
            if present is not None and _OF_STACK.match(line):
                present.append(line.rstrip())
            else:
                present = None
            continue
        name, pid, number, *state = match.groups()
        rank = None if number is None else int(number)
        process = int(pid)
        is_rank = rank is None or ranks.setdefault(rank, process) == process
        present = texts[process] = []
        found[process] = ProcessStack(
            process, _text(name), "", _text(state[0]) if state else "", is_rank, rank, node
        )
    return [replace(each, stack=_text(b"\n".join(texts[pid]))) for pid, each in found.items()]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
