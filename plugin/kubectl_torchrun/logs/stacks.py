"""The Python stacks of all ranks of a run at this moment: equal ones once, the odd rank first."""

import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kubectl_torchrun import output
from kubectl_torchrun.cluster.kubectl import Target, find_kubectl
from kubectl_torchrun.cluster.pods import list_running
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import ClusterProblem, UsageProblem
from kubectl_torchrun.terminal import Display
from torchrun_api import names

_SECONDS = 60  # for one pod
_AT_ONCE = 16  # pods
# faulthandler names threads by their ids, which differ between processes.
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+( \[.*\])? \(most recent call first\):")


class ProcessStack(msgspec.Struct, frozen=True, rename="camel"):
    """What the launcher's `stacks` prints of one process; `stack` is empty without any."""

    pid: int
    name: str
    stack: str
    state: str
    is_rank: bool
    rank: int | None = None
    node: str | None = None


class _Group(msgspec.Struct):
    """Processes with the same stacks."""

    text: str
    stacks: list[ProcessStack]


def print_stacks(target: Target, name: str, form: str, terminal: Display) -> int:
    """Print the stacks of a job's running ranks. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        pods = cluster.run(lambda api: list_running(api, job))
        if not pods:
            status = job.status
            why = f" {status.reason}: {status.message}" if status.reason else ""
            phase = status.phase or "new"
            raise UsageProblem(f"No node of job {name} is running. The job is {phase}.{why}")
        flags = cluster.pinned.flags()
    names_of_pods = [pod.metadata.name for pod in pods]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda pod: _read(flags, pod), names_of_pods))
    stacks = [stack for answer in answers if isinstance(answer, list) for stack in answer]
    for pod, answer in zip(names_of_pods, answers, strict=True):
        if isinstance(answer, str):
            terminal.note(f"Pod {pod}: {answer}")
    if not stacks:
        raise ClusterProblem(f"No process of job {name} has written its stacks.")
    show(stacks, form)
    return 0


def show(stacks: Sequence[ProcessStack], form: str = "") -> None:
    """Print stacks as text or JSON."""
    if form:
        output.write({"processes": [*map(msgspec.to_builtins, stacks)]}, form)
        return
    output.print_lines(lines_of(stacks))
    sys.stdout.flush()


def lines_of(stacks: Sequence[ProcessStack]) -> list[str]:
    """Return the text: processes with equal stacks are one group, the smallest comes first."""
    ranks = [stack for stack in stacks if stack.is_rank]
    children = [stack for stack in stacks if not stack.is_rank]
    lines = []
    for group in _fold(ranks):
        numbers = sorted(stack.rank for stack in group.stacks if stack.rank is not None)
        who = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {_ranges(numbers)}"
        lines += _describe(who if numbers else _processes(group.stacks), group)
    for group in _fold(children):
        parents = sorted({stack.rank for stack in group.stacks if stack.rank is not None})
        lines += _describe(f"{_processes(group.stacks)}, started by rank {_ranges(parents)}", group)
    return lines


def _fold(stacks: Sequence[ProcessStack]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for stack in stacks:
        text = _THREAD.sub(_name_thread, stack.stack).strip()
        groups.setdefault(text, _Group(text, [])).stacks.append(stack)
    return sorted(groups.values(), key=lambda group: (not group.text, len(group.stacks)))


def _name_thread(match: re.Match[str]) -> str:
    return f"Thread{match.group(2) or ''} (most recent call first):"


def _processes(stacks: Sequence[ProcessStack]) -> str:
    pids = ", ".join(f"{stack.name}[{stack.pid}]" for stack in stacks[:4])
    return pids if len(stacks) <= 4 else f"{pids} and {len(stacks) - 4} more processes"


def _describe(who: str, group: _Group) -> list[str]:
    first, others = group.stacks[0], len(group.stacks) - 1
    nodes = sorted({int(s.node) for s in group.stacks if s.node and s.node.isdecimal()})
    facts = [f"node{'s' if len(nodes) > 1 else ''} {_ranges(nodes)}"] if nodes else []
    facts.append(f"{others + 1} processes alike" if others else f"pid {first.pid}")
    head = f"{who} ({', '.join(facts)})"
    if not group.text:
        why = "it is not Python, or it is in a call that cannot be interrupted"
        return [f"{head}: no stack, state {first.state}: {why}"]
    return [f"{head}:", *(f"  {line}" for line in group.text.splitlines())]


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as in 0-2, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _read(flags: Sequence[str], pod: str) -> list[ProcessStack] | str:
    """Return the stacks of a pod's processes, or why there are none."""
    command = (
        "exec",
        pod,
        "-c",
        names.TRAINER_CONTAINER,
        "--",
        "python3",
        names.LAUNCHER,
        "stacks",
    )
    try:
        ended = subprocess.run(
            [find_kubectl(), *flags, *command],
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_SECONDS} s"
    if ended.returncode:
        errors = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        return errors[-1] if errors else f"exit code {ended.returncode}"
    try:
        return msgspec.json.decode(ended.stdout, type=list[ProcessStack])
    except msgspec.DecodeError as error:
        return f"its launcher has no command stacks ({error})"
