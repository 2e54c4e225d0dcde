"""Functions that run in pods: `fn(train).to(compute).distribute(workers=4)()`."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, NamedTuple

from torchrun_sdk import import_guard, own_jobs, reattach
from torchrun_sdk.call_monitor import UnavailableError
from torchrun_sdk.cancel import Cancellation
from torchrun_sdk.compute import Compute, Seconds, cpu_only, seconds
from torchrun_sdk.errors import UsageError
from torchrun_sdk.function_source import locate
from torchrun_sdk.gang import Gang
from torchrun_sdk.kubectl import Kubectl, quiet
from torchrun_sdk.manifest import GANG, gang_key, job_name
from torchrun_sdk.results import open_results
from torchrun_sdk.serialization import FORMATS, JSON, PICKLE, Unpackable, pack
from torchrun_sdk.spec import ALL, HEAD, Call, Result
from torchrun_sdk.text import escape

Function = Callable[..., Any]


class Options(NamedTuple):
    """How a call is made; see `Remote.options`."""

    timeout: float | None = None
    stream_logs: bool = True
    returns: str = ALL
    serialization: str = JSON
    linger: float = 600.0


class Remote:
    """A function that runs in pods when it is called; `local` is the function itself.

    A distributed one returns a list, the results of all ranks sorted by rank; of one pod, what the
    function returns.
    """

    def __init__(
        self, function: Function, *, name: str = "", directory: str | Path | None = None
    ) -> None:
        self.torchrun_function = function
        functools.update_wrapper(self, function)
        self._name = name or getattr(function, "__name__", "call")
        self._directory = None if directory is None else Path(directory)
        self._compute: Compute | None = None
        self._distributed: dict[str, Any] | None = None
        self._options = Options()
        self._gangs: list[Gang] = []
        self._tried: set[str] = set()

    def to(self, compute: Compute) -> Remote:
        """The same function in pods like these."""
        return self._with(_compute=compute)

    def distribute(self, framework: str = "pytorch", workers: int = 1, **rest: Any) -> Remote:
        """The same on so many workers, as `Compute.distribute`. Raises UsageError."""
        asked = {"framework": framework, "workers": workers, **rest}
        Compute().distribute(**asked)
        return self._with(_distributed=asked)

    def options(
        self,
        *,
        timeout: Seconds | None = None,
        stream_logs: bool = True,
        returns: str = ALL,
        serialization: str = JSON,
        linger: Seconds = "10m",
    ) -> Remote:
        """The same with other options of a call. Raises UsageError.

        timeout: how long the function may run. stream_logs: print the pods' log meanwhile.
        returns: of "all" ranks, or of the "head", rank 0, alone: what the others return stays in
        the pods. serialization: of arguments and results, "json" or "pickle"; a pickle from the
        pods runs code here, so take it only where you trust them. linger: how long results wait in
        the pods for a client that went away.
        """
        for value, known, what in (
            (returns, (ALL, HEAD), "returns"),
            (serialization, FORMATS, "serialization"),
        ):
            if value not in known:
                raise UsageError(f"{what} is {value!r}: it must be one of {known}")
        limit = None if timeout is None else seconds(timeout, "timeout")
        options = Options(limit, stream_logs, returns, serialization, seconds(linger, "linger"))
        return self._with(_options=options)

    def _with(self, **changed: Any) -> Remote:
        other = Remote(self.torchrun_function, name=self._name, directory=self._directory)
        unchanged = {name: getattr(self, name) for name in ("_compute", "_distributed", "_options")}
        other.__dict__.update({**unchanged, **changed})
        if set(changed) == {"_options"}:
            other._gangs, other._tried = self._gangs, self._tried
        return other

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """Call it here."""
        return self.torchrun_function(*args, **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling it, for `await`.

        Cancelling it ends the call: a job that was made for it is deleted, pods that stay from an
        earlier call stay.
        """
        cancellation = Cancellation()
        # A thread of its own: the loop's have other work, and may be few.
        threads = ThreadPoolExecutor(1, "torchrun-sdk")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(threads, self._run, args, kwargs, cancellation)
        threads.shutdown(wait=False)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            cancellation.cancel()
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # nobody asks for it
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it in the pods and return what it returns there.

        Raises UsageError before anything is made; ClusterError; CallError and its kinds; Detached
        at Ctrl-C, and the call goes on.
        """
        return self._run(args, kwargs, Cancellation())

    def _run(self, args: Any, kwargs: Any, cancellation: Cancellation) -> Any:
        function = self.torchrun_function
        import_guard.check_remote_call(function.__module__, function.__qualname__)
        compute = self._resolved_compute()
        root, call = self._prepare_call(compute, args, kwargs)
        line = _print if self._options.stream_logs else None
        while True:
            cancellation.check()
            gang = self._take_gang(compute, root, call)
            try:
                results = gang.run(call, self._options.timeout, line, cancellation)
                break
            except UnavailableError as error:
                _note(f"{gang.name}: {error}; other pods are looked for")
            finally:
                gang.busy.release()
                self._gangs[:] = [each for each in self._gangs if each.is_warm]
        return self._open_results(results, gang.name)

    def deploy(self, *args: Any, **kwargs: Any) -> str:
        """Start it and return: the name of the job. What it returns is for nobody.

        Raises as a call before anything is made, and ClusterError.
        """
        compute = self._resolved_compute()
        root, call = self._prepare_call(compute, args, kwargs)
        gang = Gang(job_name(self._name), compute, root, _note)
        gang.start(call._replace(linger=0.0))
        return gang.name

    def _prepare_call(self, compute: Compute, args: Any, kwargs: Any) -> tuple[Path, Call]:
        """The directory that is sent, and the call as its ranks read it."""
        project = locate(self.torchrun_function, self._directory)
        try:
            arguments = pack([args, kwargs], self._options.serialization, "an argument")
        except Unpackable as error:
            raise UsageError(str(error)) from error
        return project.root, Call(
            f"{int(time.time() * 1000):012x}{secrets.token_hex(4)}",
            project.function,
            arguments,
            linger=self._options.linger,
            idle=compute.idle_time,
            cpu_only=cpu_only(),
            framework=compute.distribution.framework or "",
            workers=compute.distribution.workers,
            worker_gpus=_counted_gpus(compute),
            quorum=compute.distribution.quorum_timeout,
            returns=self._options.returns,
            secret=secrets.token_hex(32) if compute.distribution.framework == "ray" else "",
        )

    def down(self) -> None:
        """End the pods that wait for another call."""
        for gang in self._gangs:
            gang.down()
        self._gangs.clear()

    def _resolved_compute(self) -> Compute:
        if self._compute is None:
            raise UsageError(
                f"{self._name} has no compute: kt.fn({self._name}).to(kt.Compute(...)), or"
                f" {self._name}.local() to call it here."
            )
        if self._distributed is None:
            return self._compute
        return self._compute.distribute(**self._distributed)

    def _take_gang(self, compute: Compute, root: Path, call: Call) -> Gang:
        """A gang whose `busy` lock this call has: a free warm one, else a new one."""
        for gang in self._gangs:
            if gang.is_warm and gang.busy.acquire(blocking=False):
                return gang
        key = gang_key(compute, call.function, root) if compute.idle_time else ""
        name, uid = self._find_warm_job(compute, key) if key else ("", "")
        found = bool(name)
        name = name or job_name(self._name)
        gang = Gang(name, compute, root, _note, key=key, created=found, uid=uid)
        gang.busy.acquire()
        self._gangs.append(gang)
        return gang

    def _find_warm_job(self, compute: Compute, key: str) -> tuple[str, str]:
        """Name and UID of a job with warm pods of another program; "" where there is none.

        Anyone in the namespace can give a job this label. So a call that opens pickles takes only
        what this user has made here.
        """
        words = ["get", "torchrunjobs", "--selector", f"{GANG}={key}", "--output=json"]
        listed = json.loads(Kubectl(compute.namespace).run(*words))["items"]
        for job in listed:
            name = str(job["metadata"]["name"])
            runs = (job.get("status") or {}).get("phase") == "Running"
            leaves = "deletionTimestamp" in job["metadata"]
            uid = str(job["metadata"].get("uid") or "")
            trusted = self._options.serialization != PICKLE or own_jobs.is_own(uid)
            if runs and not leaves and trusted and name not in self._tried:
                self._tried.add(name)
                return name, uid
        return "", ""

    def _open_results(self, results: list[Result], job: str) -> Any:
        distributed = self._resolved_compute().distribution.framework == "pytorch"
        all_ranks = distributed and self._options.returns == ALL
        wanted = results if all_ranks else results[:1]
        found = open_results(wanted, (self._options.serialization,), job)
        return found if all_ranks else found[0]


def fn(function: Function, *, name: str = "", directory: str | Path | None = None) -> Remote:
    """A function to run in pods. name: of its jobs. directory: sent, see `function_source`."""
    if isinstance(function, Remote):
        return function
    return Remote(function, name=name, directory=directory)


def compute(**resources: Any) -> Callable[[Function | Remote], Remote]:
    """Decorator: `Compute(**resources)` for the function."""
    chosen = Compute(**resources)
    return lambda function: fn(function).to(chosen)


def distribute(
    framework: str = "pytorch", workers: int = 1, **rest: Any
) -> Callable[[Function | Remote], Remote]:
    """Decorator: so many workers for the function."""
    return lambda function: fn(function).distribute(framework, workers, **rest)


def _counted_gpus(compute: Compute) -> int | None:
    """GPUs that a worker of Ray says it has, where there are none."""
    options = compute.distribution.worker_node_options or {}
    return int(options.get("gpus", compute.gpus or 0)) if cpu_only() else None


def attach(
    job: str,
    *,
    namespace: str = "",
    stream_logs: bool = True,
    timeout: Seconds | None = None,
    trust: bool = False,
) -> Any:
    """What a job's last call returned, as the call would have: after Detached, or `deploy`.

    It is waited for, `timeout` at most once all ranks have begun. A pickle is opened if you made
    the job on this machine with a call that asked for pickle, or with `trust`: it runs code that
    the job's pods choose. Raises as a call, and UntrustedPickle.
    """
    where = Kubectl(namespace or os.environ.get("TORCHRUN_NAMESPACE", ""))
    limit = None if timeout is None else seconds(timeout, "timeout")
    line = _print if stream_logs else None
    return reattach.attach(job, where, line, _note, timeout=limit, trusted=trust)


def _print(line: str) -> None:
    print(line, flush=True)


def _note(text: str) -> None:
    if not quiet():
        print(escape(text), file=sys.stderr, flush=True)
