"""Functions that run in pods: `fn(train).to(compute).distribute(workers=4)()`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, NamedTuple

from torchrun_sdk.call import local, reattach
from torchrun_sdk.call.gang import Gang
from torchrun_sdk.call.monitor import PodsUnavailableError
from torchrun_sdk.call.results import open_results
from torchrun_sdk.cluster import own_jobs
from torchrun_sdk.cluster.cancel import Cancellation
from torchrun_sdk.cluster.kubectl import Kubectl, print_note
from torchrun_sdk.cluster.manifest import GANG, gang_key, job_name
from torchrun_sdk.compute import Compute, Seconds, cpu_only, seconds
from torchrun_sdk.errors import ClusterError, UsageError
from torchrun_sdk.serialization import FORMATS, JSON, PICKLE, Unpackable, pack
from torchrun_sdk.source import import_guard
from torchrun_sdk.source.functions import locate
from torchrun_sdk.spec import ALL, HEAD, Call, Result

Function = Callable[..., Any]
# An option that a call of `options` leaves as it is. None is a value.
_UNCHANGED: Any = ...
# Protects the gangs of all functions. Copies of a function share them.
_GANGS = threading.Lock()


class Options(NamedTuple):
    """Options of a call; see `Remote.options`."""

    timeout: float | None = None
    stream_logs: bool = True
    returns: str = ALL
    serialization: str = JSON
    linger: float = 600.0


class Remote:
    """A function that runs in pods when it is called; `local` calls it in this process.

    A distributed function returns the list of results of all ranks, sorted by rank; otherwise the
    call returns the result of the function.
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
        """A copy that runs in pods with these resources."""
        return self._with(_compute=compute)

    def distribute(self, framework: str = "pytorch", workers: int = 1, **rest: Any) -> Remote:
        """A copy that runs on several workers, see `Compute.distribute`. Raises UsageError."""
        arguments = {"framework": framework, "workers": workers, **rest}
        Compute().distribute(**arguments)
        return self._with(_distributed=arguments)

    def options(
        self,
        *,
        timeout: Seconds | None = _UNCHANGED,
        stream_logs: bool = _UNCHANGED,
        returns: str = _UNCHANGED,
        serialization: str = _UNCHANGED,
        linger: Seconds = _UNCHANGED,
    ) -> Remote:
        """A copy with these options of a call; it keeps the others. Raises UsageError.

        timeout: limit for the function, None (the default) without. stream_logs: print the logs of
        the pods, True by default. returns: results of "all" ranks (the default), or only of rank 0
        ("head"). serialization: of arguments and results, "json" (the default) or "pickle"; a
        pickle from the pods can run any code here, so use it only if you trust them. linger: how
        long the pods keep results for a client that disconnected, "10m" by default.
        """
        given: dict[str, Any] = {
            "timeout": timeout if timeout in (None, _UNCHANGED) else seconds(timeout, "timeout"),
            "stream_logs": stream_logs,
            "returns": returns,
            "serialization": serialization,
            "linger": linger if linger is _UNCHANGED else seconds(linger, "linger"),
        }
        changed = {name: value for name, value in given.items() if value is not _UNCHANGED}
        options = self._options._replace(**changed)
        for value, choices, name in (
            (options.returns, (ALL, HEAD), "returns"),
            (options.serialization, FORMATS, "serialization"),
        ):
            if value not in choices:
                raise UsageError(f"{name} is {value!r}. It must be one of {choices}.")
        return self._with(_options=options)

    def _with(self, **changed: Any) -> Remote:
        other = Remote(self.torchrun_function, name=self._name, directory=self._directory)
        unchanged = {name: getattr(self, name) for name in ("_compute", "_distributed", "_options")}
        other.__dict__.update({**unchanged, **changed})
        if set(changed) == {"_options"}:
            other._gangs, other._tried = self._gangs, self._tried
        return other

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in this process, or with workers=N under torchrun on this machine.

        With workers, it returns the list of results of all ranks, one for each worker, and raises
        UsageError and CallError as a call in pods. A function that has a parameter `workers` gets
        it instead.
        """
        if "workers" not in kwargs or _has_parameter(self.torchrun_function, "workers"):
            return self.torchrun_function(*args, **kwargs)
        self._check_place("call")
        if (self._distributed or {}).get("framework") == "ray":
            raise UsageError(f"{self._name} needs a cluster for Ray. Remove workers from local().")
        workers = kwargs.pop("workers")
        compute = (self._compute or Compute()).distribute("pytorch", workers)
        root, call = self._prepare_call(compute, args, kwargs)
        name, line = job_name(self._name), _print if self._options.stream_logs else None
        results = local.run(name, compute, root, call, self._options.timeout, line)
        selected = results if self._options.returns == ALL else results[:1]
        values = open_results(selected, (self._options.serialization,), name)
        return values if self._options.returns == ALL else values[0]

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in the pods, for `await`.

        Canceling it ends the call, and deletes the job if it was created for this call. Warm pods
        of an earlier call stay. Ctrl-C under `asyncio.run` cancels it.
        """
        cancellation = Cancellation()
        # A separate thread: those of the loop may be few and busy.
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
                work.exception()  # mark it as retrieved
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function in the pods and return its result.

        Raises UsageError before anything is created; ClusterError; CallError and its subclasses;
        Detached at Ctrl-C, after which the call continues; KeyboardInterrupt if it has not started.
        """
        return self._run(args, kwargs, Cancellation())

    def _run(self, args: Any, kwargs: Any, cancellation: Cancellation) -> Any:
        self._check_place("call")
        compute = self._resolved_compute()
        root, call = self._prepare_call(compute, args, kwargs)
        line = _print if self._options.stream_logs else None
        while True:
            cancellation.check()
            gang = self._take_gang(compute, root, call)
            try:
                results = gang.run(call, self._options.timeout, line, cancellation)
                break
            except PodsUnavailableError as error:
                print_note(f"{gang.name}: {error}. Trying other pods.")
            finally:
                gang.busy.release()
                with _GANGS:
                    self._gangs[:] = [
                        each for each in self._gangs if each.is_warm or each.busy.locked()
                    ]
        return self._open_results(results, gang)

    def deploy(self, *args: Any, **kwargs: Any) -> str:
        """Start the function without waiting; the name of the job, for `attach`.

        The pods end with the function, also with `idle_time`: no other call would find them. Raises
        UsageError, ClusterError.
        """
        self._check_place("deploy")
        compute = self._resolved_compute()
        root, call = self._prepare_call(compute, args, kwargs)
        gang = Gang(job_name(self._name), compute, root, print_note)
        gang.start(call._replace(idle=0.0))
        return gang.name

    def _prepare_call(self, compute: Compute, args: Any, kwargs: Any) -> tuple[Path, Call]:
        """The directory to upload, and the call for its ranks."""
        is_pickled = self._options.serialization == PICKLE
        values = (args, kwargs) if is_pickled else None
        project = locate(self.torchrun_function, self._directory, values)
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
        """Delete the pods of this program. Raises ClusterError, after trying all.

        Warm pods of other programs, and those that continue after Ctrl-C, stay: their label does
        not show whether they run a call.
        """
        gangs = [*self._gangs]
        if not gangs and self._compute is not None and self._compute.idle_time:
            print_note(
                f"{self._name}: this program has no warm pods. Those of other programs or after"
                " Ctrl-C: kt list, kt down JOB"
            )
        errors = []
        for gang in gangs:
            try:
                gang.down()
            except ClusterError as error:
                errors.append(error)
                continue
            with _GANGS:
                self._gangs[:] = [each for each in self._gangs if each is not gang]
        if errors:
            raise errors[0]

    def _check_place(self, verb: str) -> None:
        """Raises UsageError in a rank, which would start another job."""
        name = self.torchrun_function.__qualname__
        import_guard.check_remote_call(f"{verb} {name} remotely", f"Use {name}.local() there.")

    def _resolved_compute(self) -> Compute:
        if self._compute is None:
            raise UsageError(
                f"{self._name} has no compute. Use kt.fn({self._name}).to(kt.Compute(...)), or"
                f" {self._name}.local() to call it in this process."
            )
        if self._distributed is None:
            return self._compute
        return self._compute.distribute(**self._distributed)

    def _take_gang(self, compute: Compute, root: Path, call: Call) -> Gang:
        """A gang whose `busy` lock this call holds: a free warm gang, else a new one."""
        with _GANGS:
            for gang in self._gangs:
                # The directory of a notebook may change.
                is_here = gang.root == root
                usable = gang.is_warm and is_here and self._is_trusted(is_own=gang.is_own)
                if usable and gang.busy.acquire(blocking=False):
                    return gang
        key = gang_key(compute, call.function, root) if compute.idle_time else ""
        name, uid = self._find_warm_job(compute, key) if key else ("", "")
        created = bool(name)
        name = name or job_name(self._name)
        gang = Gang(name, compute, root, print_note, key=key, created=created, uid=uid)
        gang.busy.acquire()
        with _GANGS:
            self._gangs.append(gang)
        return gang

    def _find_warm_job(self, compute: Compute, key: str) -> tuple[str, str]:
        """Name and UID of a job with warm pods of another program; "" without one.

        Any user of the namespace can set this label. So a call that opens pickles uses only jobs
        that this user created on this machine.
        """
        words = ["get", "torchrunjobs", "--selector", f"{GANG}={key}", "--output=json"]
        listed = json.loads(Kubectl(compute.namespace).run(*words))["items"]
        for job in listed:
            name = str(job["metadata"]["name"])
            is_running = (job.get("status") or {}).get("phase") == "Running"
            is_deleted = "deletionTimestamp" in job["metadata"]
            uid = str(job["metadata"].get("uid") or "")
            is_trusted = self._is_trusted(is_own=own_jobs.is_own(uid))
            if is_running and not is_deleted and is_trusted and name not in self._tried:
                self._tried.add(name)
                return name, uid
        return "", ""

    def _is_trusted(self, *, is_own: bool) -> bool:
        """Whether this call may open what a job answers: pickles only of the user's own jobs."""
        return is_own or self._options.serialization != PICKLE

    def _open_results(self, results: list[Result], gang: Gang) -> Any:
        distributed = self._resolved_compute().distribution.framework == "pytorch"
        all_ranks = distributed and self._options.returns == ALL
        selected = results if all_ranks else results[:1]
        trusted = self._is_trusted(is_own=gang.is_own)
        formats = (self._options.serialization,) if trusted else (JSON,)
        values = open_results(selected, formats, gang.name)
        return values if all_ranks else values[0]


def fn(function: Function, *, name: str = "", directory: str | Path | None = None) -> Remote:
    """A function to run in pods. name: of its jobs. directory: to upload; default: its project.

    A remote function stays as it is, or is copied with the given name and directory.
    """
    if isinstance(function, Remote):
        named = {"_name": name} if name else {}
        located = {} if directory is None else {"_directory": Path(directory)}
        return function._with(**named, **located) if named or located else function
    return Remote(function, name=name, directory=directory)


def compute(**resources: Any) -> Callable[[Function | Remote], Remote]:
    """Decorator: `Compute(**resources)` for the function."""
    resolved = Compute(**resources)
    return lambda function: fn(function).to(resolved)


def distribute(
    framework: str = "pytorch", workers: int = 1, **rest: Any
) -> Callable[[Function | Remote], Remote]:
    """Decorator: `Remote.distribute` for the function."""
    return lambda function: fn(function).distribute(framework, workers, **rest)


def _has_parameter(function: Function, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # not every callable has a signature
        return False


def _counted_gpus(compute: Compute) -> int | None:
    """GPUs that a worker of Ray claims to have with TORCHRUN_SDK_CPU_ONLY."""
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
    """Return the results of a job's last call, in the form of a call, after Detached or `deploy`.

    Waits for the call. timeout: limit after all ranks have started. A pickle, which can run any
    code, is opened only if the job was created on this machine by a call with serialization
    "pickle", or with `trust`. Raises as a call, and UntrustedPickle.
    """
    import_guard.check_remote_call(f"attach to job {job}")
    kubectl = Kubectl(namespace or os.environ.get("TORCHRUN_NAMESPACE", ""))
    limit = None if timeout is None else seconds(timeout, "timeout")
    line = _print if stream_logs else None
    return reattach.attach(job, kubectl, line, print_note, timeout=limit, trusted=trust)


def _print(line: str) -> None:
    print(line, flush=True)
