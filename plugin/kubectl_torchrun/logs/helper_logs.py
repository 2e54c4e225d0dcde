"""Logs of the pods that prepare a workspace: their sync, serve and setup containers."""

import anyio

from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.pods import end_of, has_started, list_pods
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS, PODS, JobSlice
from kubectl_torchrun.errors import DETACHED, SUCCEEDED, UsageProblem
from kubectl_torchrun.logs.streams import Cursor, View, merged
from kubectl_torchrun.terminal import Display
from torchrun_api import names
from torchrun_api.kinds.core import Pod

COMPONENTS = {
    names.SYNC_CONTAINER: names.SYNC,
    names.SERVE_CONTAINER: names.SYNC,
    names.SETUP_CONTAINER: names.SETUP,
}
_REREAD_SECONDS = 0.2


def print_helper_logs(
    target: Target, name: str, container: str, view: View, terminal: Display, *, follow: bool
) -> int:
    """Print the logs of all pods with this container, merged by time; the exit code.

    Each line starts with the number of its pod. follow: also print new lines of the latest pod
    until its container ends. Raises Problem.
    """
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        pods = cluster.run(lambda api: _list_pods(api, job, container))
        if not pods:
            raise UsageProblem(
                f"Job {name} has no pod whose {container} container has started."
                f" It is {job.status.phase or 'new'}."
            )

        async def show(api: Api) -> None:
            cursors = [
                (_number(pod), Cursor(api, pod.metadata.name, view, container)) for pod in pods
            ]
            async for number, line in merged(cursors, view, terminal.note):
                terminal.log(number, line, prefix=view.line_format.prefix)
            if follow:
                await _follow(api, pods[-1], container, cursors[-1][1], view, terminal)

        try:
            cluster.run(show)
        except KeyboardInterrupt:
            terminal.interrupted()
            return DETACHED
    return SUCCEEDED


async def _list_pods(api: Api, job: JobSlice, container: str) -> list[Pod]:
    """The pods whose container has started, by number."""
    pods = await list_pods(api, job, f"{names.COMPONENT_LABEL}={COMPONENTS[container]}")
    return sorted((pod for pod in pods if has_started(pod, container)), key=_number)


def _number(pod: Pod) -> int:
    """The number at the end of the name: 1 of `run-sync-1`."""
    text = pod.metadata.name.rpartition("-")[2]
    return int(text) if text.isdecimal() else 0


async def _follow(
    api: Api, pod: Pod, container: str, cursor: Cursor, view: View, terminal: Display
) -> None:
    """Print new lines until the container ends or its pod is deleted."""
    number = _number(pod)
    failures, last_success = 0, anyio.current_time()
    while True:
        try:
            has_ended = end_of(await api.get(PODS, pod.metadata.name), container) is not None
            async for line in cursor.read(follow=True, has_ended=has_ended):
                if view.shows(number, line):
                    text = view.line_format.format(cursor.stamp, line)
                    terminal.log(number, text, prefix=view.line_format.prefix)
            if has_ended:
                return
            failures, last_success = 0, anyio.current_time()
        except (RequestError, Unreachable) as error:
            if isinstance(error, RequestError) and error.status == 404:
                return
            retriable = isinstance(error, Unreachable) or error.retriable
            if not retriable or anyio.current_time() - last_success > api.backoff.give_up:
                raise
            failures += 1
        await anyio.sleep(api.backoff.delay(failures) if failures else _REREAD_SECONDS)
