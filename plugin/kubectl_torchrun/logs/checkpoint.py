"""Ask the ranks of a job for a checkpoint, and follow what they agree on."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kubectl_torchrun.cluster.exec_forward import find_worker_in
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS, CheckpointSlice
from kubectl_torchrun.errors import SUCCEEDED, ClusterProblem, Problem
from kubectl_torchrun.terminal import Display
from torchrun_api.names import LAUNCHER

_PAUSE = 1.0
_SPARE_SECONDS = 10.0  # for the launcher to say that the time is over
_WORDS = {
    "asked": "Asking all ranks.",
    "proposed": "Call {call} of torchrun_progress.stopping() is proposed.",
    "committed": "All ranks save at call {call} of torchrun_progress.stopping().",
    "done": "All ranks have passed call {call}: they have saved, or save now, and go on.",
}
_NO_CHECKPOINT = "No new checkpoint was reported"


class SaveAnswer(msgspec.Struct, frozen=True):
    """A state of the request, as the launcher's `save` prints it. why: of a refusal."""

    state: str
    call: int = 0
    why: str = ""


def request_checkpoint(target: Target, name: str, seconds: float, terminal: Display) -> int:
    """Ask the ranks of a running job to save and go on; the exit code. Raises Problem."""
    with session(target) as cluster:

        def read_last() -> CheckpointSlice | None:
            return cluster.run(lambda api: api.get(JOBS, name)).status.last_checkpoint

        worker = find_worker_in(cluster, name, 0, None)
        argv = worker.exec_command(["python3", LAUNCHER, "save", f"{seconds:g}"])
        stacks = f"kubectl torchrun stacks {name}"
        return follow(_answers(argv, seconds), read_last, seconds, stacks, terminal)


def follow(
    answers: Iterable[SaveAnswer],
    read: Callable[[], CheckpointSlice | None],
    seconds: float,
    stacks: str,
    terminal: Display,
) -> int:
    """Print what the ranks agree on, then the new checkpoint; the exit code. Raises Problem.

    answers: begin to ask when they are iterated. read: the last checkpoint that was reported.
    seconds: for all of it. stacks: the command that shows what the ranks do.
    """
    before, end = read(), time.monotonic() + seconds
    if missing := show(answers, terminal):
        raise Problem(f"{missing} within {seconds:g} s. Look for a rank that hangs: {stacks}")
    if not await_checkpoint(read, before, end, terminal):
        raise Problem(
            f"{_NO_CHECKPOINT} within {seconds:g} s. After a save, each rank calls"
            " torchrun_progress.checkpoint(step, path). If saves take longer, set --timeout."
        )
    return SUCCEEDED


def show(answers: Iterable[SaveAnswer], terminal: Display) -> str:
    """Print each new state, and return what was missing when the time was over.

    "" if all ranks save. Raises Problem if they refuse.
    """
    last, since, missing = SaveAnswer(""), time.monotonic(), "The ranks have not agreed on a call"
    for answer in answers:
        if answer.state == "refused":
            raise Problem(f"The ranks do not save: {answer.why.removesuffix('.')}.")
        if answer.state == "late":
            return missing
        if answer.state == "committed":
            missing = f"Not all ranks have passed call {answer.call}"
        if answer == last:
            terminal.waiting(missing, "", time.monotonic() - since)
            continue
        last, since = answer, time.monotonic()
        terminal.note(_WORDS.get(answer.state, answer.state).format(call=answer.call))
    return ""


def await_checkpoint(
    read: Callable[[], CheckpointSlice | None],
    before: CheckpointSlice | None,
    end: float,
    terminal: Display,
) -> bool:
    """Print the checkpoint that follows `before`; False if there is none until `end`."""
    began = time.monotonic()
    while (newest := read()) in (None, before):
        now = time.monotonic()
        if now >= end:
            return False
        terminal.waiting(_NO_CHECKPOINT, "", now - began)
        time.sleep(_PAUSE)
    terminal.at_rest()
    terminal.note(f"New checkpoint: step {newest.step}, {newest.path}")
    return True


def _answers(argv: list[str], seconds: float) -> Iterator[SaveAnswer]:
    """Run the launcher's command in the pod. Raises ClusterProblem without an answer in time."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        end = threading.Timer(seconds + _SPARE_SECONDS, process.kill)
        end.daemon = True
        end.start()
        state = ""
        for line in process.stdout:
            answer = msgspec.json.decode(line, type=SaveAnswer)
            state = answer.state
            yield answer
        end.cancel()
        errors = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
    if state not in ("done", "refused", "late"):
        raise ClusterProblem(errors[-1] if errors else "The launcher has not answered.")
