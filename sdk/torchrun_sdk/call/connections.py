"""Connections of the client into the pods of a gang, for results, and for calls to warm pods."""

from __future__ import annotations

import base64
import json
import queue
import threading
import time
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable

from torchrun_sdk.cluster.kubectl import LONGEST_LINE, Child, Kubectl
from torchrun_sdk.cluster.manifest import ATTEMPT, CONTAINER, child_job, node_of
from torchrun_sdk.cluster.watch import Failures
from torchrun_sdk.errors import ClusterError, SdkError
from torchrun_sdk.spec import (
    ENTRY,
    FOLDER,
    FREE,
    Call,
    Exited,
    FrameError,
    Here,
    Lines,
    Message,
    Raised,
    Ready,
    Refused,
    Removed,
    Result,
    Started,
    Wants,
    decode,
    dump_call,
)

_AGAIN = 0.5  # between two attempts to connect to a pod
_LAST_WORDS = 2.0  # to send the last messages
_LONGEST_BACKLOG = 64 << 20  # characters of messages that the call has not handled yet
_BACKLOG_POLL = 0.02
_PIECE = 256 << 10  # bytes of a file in one line
# Its stderr stays connected: containerd 1.6 ends an exec whose stderr is closed.
_COLLECT = f'exec python3 -S "$TORCHRUN_WORKSPACE_TARGET/{FOLDER}/{ENTRY}" collect "$0"'

# Kind and value: "frame" (attempt, frame), "lines" (attempt, node's index, Lines), "here" and
# "ready" (attempt, pod), "refused" (state), "unreadable" (pod, why), "trouble" (a Trouble),
# "failed" (an exception of the client).
MonitorEvent = tuple[str, Any]


class CallDelivery:
    """A call for warm pods, and the state of the directory when `start_listing` is called."""

    def __init__(self, call: Call, root: Path, kubectl: Kubectl) -> None:
        self._call = call
        self._root = root
        self._kubectl = kubectl
        self._files: Future[str] = Future()
        self._listing_started = threading.Lock()

    def start_listing(self) -> None:
        """List the directory in a thread; later calls do nothing."""
        if self._listing_started.acquire(blocking=False):
            threading.Thread(target=self._list_files, daemon=True).start()

    def _list_files(self) -> None:
        try:
            self._files.set_result(self._kubectl.run_plugin("files", str(self._root)))
        except BaseException as error:
            self._files.set_exception(error)

    def announcement(self) -> str:
        """The line that announces the call. Raises ClusterError."""
        self.start_listing()
        packed = base64.b64encode(zlib.compress(self._files.result().encode(), 6)).decode()
        call = json.loads(dump_call(self._call))
        return json.dumps({"bring": packed, "call": call})

    def send(self, numbers: list[int], line: Callable[[str], None]) -> None:
        """Send these files in lines, then the last line. Raises OSError."""
        listed = self._files.result().split("\n")
        for number in numbers:
            path = self._root / listed[number].split(" ", 3)[3]
            with path.open("rb") as file:
                piece = file.read(_PIECE)
                while True:
                    following = file.read(_PIECE)
                    data = base64.b64encode(piece).decode()
                    body = {"content": number, "data": data, "more": bool(following)}
                    line(json.dumps(body))
                    if not following:
                        break
                    piece = following
        line(json.dumps({"whole": True}))


class Connections:
    """One connection into each running pod, restarted after a failure.

    job: the name of the TorchrunJob. call: the call whose results are requested, "" for the newest
    of each pod at the first connection. delivery: for pods that do not have this call.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        job: str,
        call: str,
        events: queue.Queue[MonitorEvent],
        delivery: CallDelivery | None = None,
    ) -> None:
        self._kubectl = kubectl
        self._job = job
        self._call = call
        self._events = events
        self._delivery = delivery
        self._closed = threading.Event()
        self._pods: dict[str, _Pod] = {}
        self._backlog = 0
        self._backlog_lock = threading.Lock()

    def pod(self, pod: dict[str, Any], *, is_deleted: bool) -> None:
        """Handle a changed pod. Pods of another Job, or of none, may have a worker's labels."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        name = metadata["name"]
        running = status.get("phase") == "Running" and not is_deleted
        if running and name not in self._pods:
            labels = metadata.get("labels") or {}
            try:
                attempt, index = int(labels.get(ATTEMPT, 0)), str(node_of(labels))
            except ValueError:
                return
            if not _is_owned_by(child_job(self._job, labels), metadata):
                return
            new_pod = self._pods[name] = _Pod(name, attempt, index)
            threading.Thread(target=self._collect, args=(new_pod,), daemon=True).start()
        elif not running and name in self._pods:
            self._pods[name].is_over.set()

    def go(self, attempt: int) -> None:
        """Start the delivered call in the pods of a gang."""
        gang_pods = [pod for pod in self._pods.values() if pod.attempt == attempt]
        number = max(pod.last for pod in gang_pods) + 1
        for pod in gang_pods:
            pod.send(json.dumps({"go": number}))

    def end(self) -> None:
        """Kill all ranks of the call that still run."""
        for pod in self._pods.values():
            pod.send(json.dumps({"end": True}))

    def close(self) -> None:
        """Close all connections after the last messages are sent."""
        self._closed.set()
        children = [pod.child for pod in self._pods.values() if pod.child is not None]
        for child in children:
            child.close_stdin()
        until = time.monotonic() + _LAST_WORDS
        for child in children:
            child.wait(max(0.0, until - time.monotonic()))
            child.close()

    def _collect(self, pod: _Pod) -> None:
        command = self._kubectl.command(
            "exec", "--stdin", pod.name, f"--container={CONTAINER}", "--",
            "/bin/sh", "-c", _COLLECT,
        )  # fmt: skip
        call = self._call
        failures = Failures(
            f"kubectl exec {pod.name}", lambda why: self._events.put(("trouble", why))
        )
        while not (self._closed.is_set() or pod.is_over.is_set()):
            # The next connection repeats a line that was cut by the end of the previous one.
            child = pod.child = Child(
                [*command, call], lambda line: self._line(line, pod), whole=True
            )
            if self._closed.is_set():  # `close` has ended only the connection before
                child.close()
                return
            child.wait()
            failures.ended(child)
            child.close()
            call = call or pod.call  # the pod may have a newer one by then
            self._closed.wait(_AGAIN)

    def _line(self, line: str, pod: _Pod) -> str | None:
        """Handle a message; the acknowledgement of a last frame lets its rank end.

        Does not raise, because only this thread would see it: an error ends the call.
        """
        if not line.startswith("{"):  # the heartbeat of the connection
            return None
        self._wait_for_room(len(line))
        try:
            if len(line) >= LONGEST_LINE:
                raise FrameError(f"it has more than {LONGEST_LINE} characters")
            return self._take(decode(line), pod)
        except SdkError as error:
            self._events.put(("failed", error))
        except OSError as error:
            message = f"Cannot read a file that the pods need: {error}. Call again."
            self._events.put(("failed", ClusterError(message)))
        except FrameError as error:
            self._events.put(("unreadable", (pod.name, str(error))))
        except Exception as error:
            self._events.put(("unreadable", (pod.name, repr(error))))
        return None

    def _wait_for_room(self, size: int) -> None:
        """Wait while there is too much to handle: a pod may print faster than a terminal."""
        while self._events.qsize() and self._backlog > _LONGEST_BACKLOG:
            if self._closed.wait(_BACKLOG_POLL):
                return
        with self._backlog_lock:
            self._backlog = size + (self._backlog if self._events.qsize() else 0)

    def _take(self, message: Message | None, pod: _Pod) -> str | None:
        if isinstance(message, (Started, Result, Raised, Exited, Removed)):
            self._events.put(("frame", (pod.attempt, message)))
            return None if isinstance(message, (Started, Removed)) else str(message.rank)
        if isinstance(message, Here) and message.has_call:
            pod.call = message.call
        if isinstance(message, Lines):
            self._events.put(("lines", (pod.attempt, pod.index, message)))
        elif self._delivery is not None and message is not None:
            self._deliver(message, pod, self._delivery)
        return None

    def _deliver(self, message: object, pod: _Pod, delivery: CallDelivery) -> None:
        if isinstance(message, Here):
            pod.last = message.last
            if message.has_call:
                return
            self._events.put(("here", (pod.attempt, pod.name)))
            if message.state == FREE:
                pod.send(delivery.announcement())
            else:
                self._events.put(("refused", message.state))
        elif isinstance(message, Wants):
            delivery.send(message.lines, pod.send)
        elif isinstance(message, Ready):
            self._events.put(("ready", (pod.attempt, pod.name)))
        elif isinstance(message, Refused):
            self._events.put(("failed", ClusterError(f"{pod.name}: {message.why}")))


def _is_owned_by(job: str, metadata: dict[str, Any]) -> bool:
    """Whether the controller of a pod is the Job of this name.

    This excludes copies of a Job, not forged pods: who creates a pod can write any owner and UID.
    """
    owners = metadata.get("ownerReferences") or ()
    controllers = [owner for owner in owners if owner.get("controller")]
    return any(owner.get("kind") == "Job" and owner.get("name") == job for owner in controllers)


class _Pod:
    """The current connection to a pod; it is replaced after a failure."""

    def __init__(self, name: str, attempt: int, index: str) -> None:
        self.name = name
        self.attempt = attempt
        self.index = index
        self.last = 0
        self.call = ""  # that it sends
        self.is_over = threading.Event()
        self.child: Child | None = None

    def send(self, line: str) -> None:
        if self.child is not None:
            self.child.send(line)
