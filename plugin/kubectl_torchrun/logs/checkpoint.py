"""Ask the ranks of a job for a checkpoint, and follow what they agree on."""

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kubectl_torchrun.cluster.exec_forward import find_worker_in
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS, CheckpointSlice
from kubectl_torchrun.errors import RUN_FAILED, ClusterProblem
from kubectl_torchrun.terminal import Display
from torchrun_api.names import LAUNCHER

# For the report of a checkpoint: of a job that has reported none, and of others.
_FIRST_SECONDS, _NEXT_SECONDS = 30.0, 300.0
_PAUSE = 1.0
_WORDS = {
    "asked": "Asking all ranks.",
    "proposed": "Call {call} of torchrun_progress.stopping() is proposed.",
    "committed": "All ranks save at call {call} of torchrun_progress.stopping().",
    "done": "All ranks have passed call {call}: they have saved, or save now, and go on.",
}


class SaveAnswer(msgspec.Struct, frozen=True):
    """A state of the request, as the launcher's `save` prints it. why: of a refusal."""

    state: str
    call: int = 0
    why: str = ""


def request_checkpoint(target: Target, name: str, terminal: Display) -> int:
    """Ask the ranks of a running job to save and go on; the exit code. Raises Problem."""
    with session(target) as cluster:

        def read_last() -> CheckpointSlice | None:
            return cluster.run(lambda api: api.get(JOBS, name)).status.last_checkpoint

        worker = find_worker_in(cluster, name, 0, None)
        before = read_last()
        code = show(_answers(worker.exec_command(["python3", LAUNCHER, "save"])), terminal)
        if code == 0:
            await_checkpoint(read_last, before, terminal)
        return code


def await_checkpoint(
    read: Callable[[], CheckpointSlice | None], before: CheckpointSlice | None, terminal: Display
) -> None:
    """Print the checkpoint that follows `before` in the status, or that there is none in time."""
    seconds = _FIRST_SECONDS if before is None else _NEXT_SECONDS
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        newest = read()
        if newest is not None and newest != before:
            terminal.note(f"New checkpoint: step {newest.step}, {newest.path}")
            return
        time.sleep(_PAUSE)
    terminal.note(
        f"No new checkpoint was reported within {seconds:.0f} s. After a save, each rank calls"
        " torchrun_progress.checkpoint(step, path)."
    )


def show(answers: Iterable[SaveAnswer], terminal: Display) -> int:
    """Print each answer, and return the exit code."""
    for answer in answers:
        if answer.state == "refused":
            terminal.note(f"The ranks do not save: {answer.why.removesuffix('.')}.")
            return RUN_FAILED
        terminal.note(_WORDS.get(answer.state, answer.state).format(call=answer.call))
    return 0


def _answers(argv: list[str]) -> Iterator[SaveAnswer]:
    """Run the launcher's command in the pod. Raises ClusterProblem without an answer."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        state = ""
        for line in process.stdout:
            answer = msgspec.json.decode(line, type=SaveAnswer)
            state = answer.state
            yield answer
        errors = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
    if state not in ("done", "refused"):
        raise ClusterProblem(errors[-1] if errors else "The launcher has not answered.")
