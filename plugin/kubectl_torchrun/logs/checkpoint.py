"""Ask the ranks of a job for a checkpoint, and follow what they agree on."""

import subprocess
from collections.abc import Iterable, Iterator

import msgspec

from kubectl_torchrun.cluster.kubectl import Target, find_kubectl
from kubectl_torchrun.cluster.pods import list_running, rank_of
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import RUN_FAILED, ClusterProblem, UsageProblem
from kubectl_torchrun.terminal import Display
from torchrun_api import names

_LAUNCHER = f"{names.LAUNCHER_DIR}/launch"
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
        job = cluster.run(lambda api: api.get(JOBS, name))
        pods = cluster.run(lambda api: list_running(api, job))
        flags = cluster.pinned.flags()
    first = [pod.metadata.name for pod in pods if rank_of(pod) == 0]
    if not first:
        phase = job.status.phase or "new"
        raise UsageProblem(f"Node 0 of job {name} is not running. The job is {phase}.")
    command = ("exec", first[0], "-c", names.TRAINER_CONTAINER, "--", "python3", _LAUNCHER, "save")
    return show(_answers([find_kubectl(), *flags, *command]), terminal)


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
